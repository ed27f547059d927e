"""Converts text to token ids: `tokenizer_file.py` opens a tokenizer, `patterns.py` has the expressions of published ones, `texts.py`
tokenises and truncates, `words.py` caches the ids of words, `threads.py` runs this work on threads.
"""
