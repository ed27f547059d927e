"""`attnserve bench-generate`: the speed of text generation, and what it is compared with.

`command.py` is the command, `contestants.py` has its options and exports what is compared, `measuring.py` takes the figures, `over_http.py`
those over HTTP; `rows.py` judges them, `plots.py` draws them.
"""
