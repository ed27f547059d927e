"""Benchmarks: contestants take turns on one machine, and the ratios of their figures are judged.

`runner.py` runs contestants and judges their figures. `encoder.py` is `attnserve bench`, beside infinity-emb (`peers.py`, whose model
`infinity_model.py` makes); `split.py` is `attnserve bench-split`, `long.py` `attnserve bench-long`, `generation/` `attnserve
bench-generate`.
"""
