"""`attnserve bench-generate`: compares the speed of text generation with other programs.

`command.py` is the command, `contestants.py` has its options and exports the models to compare, `measuring.py` measures without HTTP and
`over_http.py` over HTTP, `rows.py` compares the figures with required values, `plots.py` draws them.
"""
