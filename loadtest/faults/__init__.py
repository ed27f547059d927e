"""Measures how clients are answered while processes fail: `streams.py` compares texts that are streamed (`reading.py`) while the faults of
`striking.py` strike, and `demo.py` (`attnserve demo crash`) shows one of them.
"""
