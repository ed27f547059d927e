"""The training of a decoder of pictures: `digits.py` (a command that writes scikit-learn's digits as texts) and `task.py`."""
