"""Decoder layers whose past is a matrix of constant size that decays or is overwritten: `retention.py`, `gated_linear.py`, `delta.py`,
`gated_delta.py`. `half_lives.py` contains their initial decay rates, and `layers/recurrence.py` the recurrence itself.
"""
