"""What a model attends to: `matrix.py` of a layer, `model.py` of all layers on one text, `rank.py` how many dimensions a matrix has."""
