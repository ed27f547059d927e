"""The training of a decoder of pictures: `digits.py` (a command that writes scikit-learn's digits as texts), `drawings.py`
(pictures sampled from a model), `card.py` (model card) and `task.py`.
"""
