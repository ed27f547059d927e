"""Graphs for GPUs, each beside the served graph of a bundle. No shape and no work in them depends on data.

- `packed_encoder.py`: encoders, rerankers and classifiers, over packed tokens.
- `kernels.py`: checks that the CUDA provider computes every node.
- `cpu_twin.py`: makes a graph computable on a CPU, to check it.
"""
