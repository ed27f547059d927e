"""Converts text to token ids: `tokenizer_file.py` opens a tokenizer, `texts.py` tokenises and truncates, `words.py` caches the ids of
words, `threads.py` runs this work on threads.
"""
