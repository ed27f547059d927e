"""Attention maps: the weights with which each token of a text attends to every other token.

- `attention_graph.py`: exports a model as a graph that returns the attention matrices of all layers.
- `attention_bundle.py`: adds this graph to a bundle and compares it with torch.
- `heatmaps.py`: draws maps on the terminal, as PNG and as SVG.
- `from_bundle.py`: computes the maps of a text with a bundle.
- `from_checkpoint.py`: computes the maps of a text with a checkpoint folder, in torch.
"""
