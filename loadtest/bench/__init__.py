"""`attnserve bench PART`: the sides of a part are measured in turns on one machine, and the ratios of their figures are compared with
required values.

`parts.py` has the parts as data, and `command.py` the command. `encoder.py` compares with infinity-emb too, whose environment `make peers`
makes (`infinity.txt`, `infinity_model.py`). `overhead.py`, `split.py`, `generate.py`, `states.py` and `long.py` are parts as well. Others
are in `loadtest/in_process/` and `loadtest/faults/`.
"""
