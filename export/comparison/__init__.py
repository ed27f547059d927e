"""Benchmarks of every attention mechanism, run in onnxruntime on its exported layer: the command `attnserve compare`.

Read `mechanisms.py` (the compared layers), `layer_graph.py` (a layer as a graph, and its differences from torch), `growth.py` (time and
memory at each length), `matrices.py` (ranks), `run.py` (plan, results, and all measurements in turn) and `page.py`.
"""
