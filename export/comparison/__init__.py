"""Benchmarks of every attention mechanism, run in onnxruntime on its exported layer: the command `attnserve compare`.

Read `plan.py` (the sizes), `mechanisms.py` (the compared layers, with `convolution.py` and `recurrent.py`), `layer_graph.py` (exports one
layer as a graph), then the measurements: `growth.py` with `child.py`, `parity.py`, `matrices.py`. `results.py` stores the results, `run.py`
runs all measurements in turn, and `tables.py`, `exponents.py`, `plots.py` and `page.py` write the page.

`loadtest/` measures the running service. This package measures single torch layers and their graphs, and needs no service.
"""
