"""Benchmarks: contestants (programs or models) are measured in turns on one machine, and the ratios of their figures are compared with
required values.

`runner.py` runs contestants and evaluates their figures. `encoder.py` is `attnserve bench`, which compares with infinity-emb (`peers.py`,
whose model `infinity_model.py` makes), and `overhead.py` its part `overhead` (with `hello.py` for scale); `split.py` is `attnserve
bench-split`, `long.py` `attnserve bench-long`, `states.py` and `states_over_http.py` `attnserve bench-states`, `generation/` `attnserve
bench-generate`, `gpu.py` `attnserve bench-gpu`, whose clients are `gpu_clients.py`.
"""
