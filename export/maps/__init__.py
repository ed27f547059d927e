"""Attention maps: what every token of a text attends to.

- `attention_graph.py`: a model as a graph that gives the attention matrices of all layers.
- `attention_bundle.py`: adds this graph to a bundle and compares it with torch.
- `heatmaps.py`: draws maps on the terminal, as PNG and as SVG.
- `from_bundle.py`: the maps of a text from a bundle.
- `from_checkpoint.py`: the maps of a text from a checkpoint folder, computed in torch.
"""
