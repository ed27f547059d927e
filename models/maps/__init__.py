"""Computes attention matrices: `matrix.py` of one layer, `model.py` of all layers on one text. `rank.py` computes their ranks."""
