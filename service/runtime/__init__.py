"""What all engines share. No model and no HTTP here.

Read in this order: `onnx.py` (one call of ONNX Runtime), `budget.py` (the CPUs it may use), `side_by_side.py` (several calls at once),
`engine_protocol.py` (what an engine offers), `lanes.py` and `fairness.py` (whose turn it is), `overload.py` (when a request is refused),
`offered.py` (how much work was asked for), `moving_average.py`, `shares.py` and `memory.py` (bytes), `timer.py`.
"""
