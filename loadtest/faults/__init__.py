"""Measures the answers to clients while processes and nodes fail: `kills.py` on one machine, `changes.py` (`attnserve bench-faults`) on a
cluster of several nodes that `cluster.py` starts on this machine.

`streams.py` (`attnserve bench-streams`) kills the generators of streams, which `reading.py` reads and compares; `demo.py` (`attnserve demo
crash`) shows one such stream.
"""
