"""`attnserve bench-generate`: the speed of text generation, and what it is compared with.

`command.py` is the command, `plan.py` its options, `contestants.py` exports what is compared, `measuring.py` takes the figures,
`streams.py` and `sharing.py` those over HTTP; `rows.py` judges them, `plots.py` draws them.
"""
