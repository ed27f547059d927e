"""Converts text to token ids: `tokenizer_file.py` opens a tokenizer, `texts.py` tokenises and truncates, `threads.py` runs this work on
threads.
"""
