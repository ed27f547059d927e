"""Attention maps: the weights with which each token of a text attends to every other token.

- `attention_graph.py`: adds to a bundle a graph that returns the attention matrices of all layers, and compares it with torch.
- `heatmaps.py`: draws maps on the terminal, as PNG and as SVG.
- `of_text.py`: computes the maps of a text, with a bundle or with a checkpoint folder.
"""
