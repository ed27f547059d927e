"""Decoders whose past is a matrix of constant size that fades or is corrected: `retention.py`, `gated_linear.py`, `delta.py`,
`gated_delta.py`, with `half_lives.py` (how slowly it fades at first). The recurrence itself is in `layers/recurrence.py`.
"""
