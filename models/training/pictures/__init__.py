"""How a decoder of pixels is trained: `digits.py` writes scikit-learn's digits as texts, `drawings.py` draws, `card.py` the card."""
