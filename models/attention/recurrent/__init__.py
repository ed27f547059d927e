"""Decoder layers whose state is a matrix of constant size that decays or is overwritten.

They are `retention.py`, `gated_linear.py`, `delta.py` and `gated_delta.py`. `half_lives.py` computes the initial decay rates of the two
gated layers, and `layers/recurrence.py` the recurrence of all four.
"""
