"""Attention at a cost linear in N, with the softmax replaced.

By feature maps (`feature_maps.py`, `learned_maps.py`): `linear.py`, `causal_linear.py`, `hedgehog.py`, `based.py`, and `hybrid.py`
with exact weights for near tokens. By random features (`random_features.py`): `performer.py`, `causal_performer.py`. By summaries of
the keys: `efficient.py`, `causal_efficient.py`, `nystrom.py` (`landmarks.py`), `vq.py`, `causal_vq.py`, `vq_near.py` (`codebook.py`).
"""
