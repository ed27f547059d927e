"""Modules that all engines use. They depend neither on a model nor on HTTP.

Read in this order: `onnx.py` (calls of ONNX Runtime), `bound.py` (a graph with fixed memory), `budget.py` (the CPUs that this process may
use), `priority.py` (that of threads that compute), `side_by_side.py` (concurrent calls), `engine_protocol.py` (the methods of an engine),
`lanes.py` and `fairness.py` (the order of work), `offered.py` (the load), `moving_average.py`, `lru.py` (a bounded cache), `price.py` (the
expected time of a call), `memory.py` (returns freed memory to the system), `garbage.py` (the garbage collector), `pacing.py` (how often
streams send messages), `steps.py` (work on a thread that ends when its client leaves).
"""
