"""Every mechanism side by side, measured in onnxruntime on its exported layer: what `attnserve compare` runs and writes.

Read `plan.py` (the sizes), `mechanisms.py` (who is compared), `costs.py` (what is stated), `layer_graph.py` (one layer becomes a graph),
then what is measured: `growth.py` with `child.py`, `parity.py`, `matrices.py`; `results.py` is what is kept of it, `run.py` takes all in
turn, and `tables.py`, `deviation.py`, `plots.py` and `page.py` make the page.
"""
