"""Encoders on a GPU, by the bundle's graph for GPUs: `packing.py` (packs texts into inputs of a few fixed shapes) and `session.py` (runs
the graph, one CUDA graph for each shape).
"""
