"""Softmax replaced by something of linear cost.

By a feature map: `feature_maps.py` and `learned_maps.py`, `linear.py` and `causal_linear.py`, `hedgehog.py`, `based.py`, `hybrid.py` (with
exact weights nearby). By random features: `random_features.py`, `performer.py` and `causal_performer.py`. By summaries: `efficient.py` and
`causal_efficient.py`, `nystrom.py` with `landmarks.py`, `vq.py` and `causal_vq.py` with `codebook.py` and `vq_near.py`.
"""
