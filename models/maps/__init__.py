"""Computes attention matrices: `matrix.py` that of one layer, `model.py` those of all layers of a model on one text. `rank.py` computes
the rank of such a matrix.
"""
