"""The task of a decoder of pixels: `digits.py` (a command that writes scikit-learn's digits as texts), `drawings.py` (pictures that a
model draws), `card.py` (model card) and `task.py`.
"""
