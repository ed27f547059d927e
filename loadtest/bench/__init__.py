"""Benchmarks: contestants take turns on one machine, and ratios are judged.

`rounds.py` and `rows.py` measure and judge encoders for `encoder.py` (`attnserve bench`), beside infinity-emb (`peers.py`, whose model
`infinity_model.py` makes); `split.py` is `attnserve bench-split`, `long.py` `attnserve bench-long`, `generation/` `attnserve
bench-generate`.
"""
