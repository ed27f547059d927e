"""Every mechanism side by side, measured in onnxruntime on its exported layer: what `attnserve compare` runs and writes.

Read `plan.py` (the sizes), `mechanisms.py` (what is compared: the layers, with `convolution.py` and `recurrent.py` beside them),
`layer_graph.py` (one layer becomes a graph), then what is measured: `growth.py` with `child.py`, `parity.py`, `matrices.py`. `results.py`
is what is kept of it, `run.py` takes all in turn, and `tables.py`, `deviation.py`, `plots.py` and `page.py` make the page.

It is here and not in `loadtest/`, which measures the running service from outside: this measures single torch layers and their graphs, and
needs models, the exporter and no service.
"""
