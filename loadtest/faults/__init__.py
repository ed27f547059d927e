"""Measures how clients are answered while processes and nodes fail: `kills.py` on one machine, `changes.py` (`attnserve bench-faults`) on a
cluster of several nodes that `cluster.py` starts on this machine.

`streams.py` (`attnserve bench-streams`) streams texts while `striking.py` kills or stops processes. `reading.py` reads the streams and
compares them with undisturbed ones. `demo.py` (`attnserve demo crash`) shows one such stream.
"""
