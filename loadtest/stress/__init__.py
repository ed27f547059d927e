"""Stress tests: `goodput.py` measures the work that an overloaded service does, `memory_soak.py` its memory after unusual requests."""
