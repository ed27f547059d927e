"""`attnserve bench PART`: the sides of a part are measured in turns on one machine, and the ratios of their figures are compared with
required values. `parts.py` has the parts as data; `encoder.py` needs the environment that `make peers` makes (`infinity_model.py`).
"""
