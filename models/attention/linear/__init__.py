"""Attention at a cost linear in N, because the softmax over all keys is replaced.

Feature maps (`feature_maps.py`, `learned_maps.py`) replace it in `linear.py`, `causal_linear.py`, `hedgehog.py`, `based.py` and, for far
tokens only, in `hybrid.py` and `causal_hybrid.py`. Random features (`random_features.py`) replace it in `performer.py` and
`causal_performer.py`. Summaries of the keys replace it in `efficient.py` and `causal_efficient.py`, in `nystrom.py` (with
`landmarks.py`), and in `vq.py`, `causal_vq.py` and `vq_near.py` (with `codebook.py`).
"""
