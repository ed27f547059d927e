"""`goodput.py` measures the work done by an overloaded service, `memory_soak.py` its memory after unusual requests."""
