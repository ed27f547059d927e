"""Engines in other processes: what a gateway asks of a pool of replicas, and how a replica answers. No Ray here, and no HTTP.

Read in this order: `wire.py` and `messages.py` (the values that cross), `limits.py` (how large they may be), `replicas.py` (which replica
is asked and whether it answers), `client.py` (the engines that a gateway's models have), `catalog.py` (these models), `host.py` (the
replica's end). `service/deployment/split.py` puts Ray between the two.
"""
