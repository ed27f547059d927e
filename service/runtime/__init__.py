"""What all engines share. No model and no HTTP here.

Read in this order: `onnx.py` (one call of ONNX Runtime), `budget.py` (the CPUs it may use), `side_by_side.py` (several calls at once),
`engine_protocol.py` (what an engine offers), `lanes.py` and `fairness.py` (the order of work), `offered.py` (the load),
`moving_average.py`, `memory.py` (freed memory goes back to the system), `timer.py`.
"""
