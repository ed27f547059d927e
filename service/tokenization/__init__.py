"""Converts text to token ids: `tokenizer_file.py` opens a tokenizer, `patterns.py` has the expressions of published ones, `texts.py`
tokenises and truncates, `beginnings.py` finds how much of a text is needed, `words.py` caches the ids of words, `threads.py` runs this work
on threads.
"""
