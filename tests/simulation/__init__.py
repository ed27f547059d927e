"""The whole service but its processes, in one thread, under virtual time and seeded faults. See `world.py`."""
