"""`goodput.py`: work done by an overloaded service; `memory_soak.py`: memory after unusual requests."""
