"""Simulates the service without its sockets and threads, in one thread, under virtual time and seeded faults.

Reading order: `loop.py` (virtual time, a seeded order of callbacks), `plain.py` (what every request must give), `engines.py` (the engine
and the store without their threads), `network.py` (processes that die and pause), `history.py` (what is checked), `clients.py`, `world.py`
(one schedule of a gateway, generators, store and clients), `gateways.py` (one of gateways and their leases), `mutants.py` (bugs that the
checks must find). `python -m tests.simulation --seeds 1 --first SEED` runs one schedule again, and prints its end if it goes wrong.
"""
