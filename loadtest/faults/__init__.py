"""Measures how clients are answered while processes and nodes fail: `kills.py` on one machine, `changes.py` (`attnserve bench-faults`) on a
cluster of several nodes that `cluster.py` starts on this machine.

`streams.py` (`attnserve bench-streams`) streams texts, which `reading.py` reads and compares, while processes are killed or stopped, by
`striking.py`; `demo.py` (`attnserve demo crash`) shows one such stream.
"""
