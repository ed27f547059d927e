"""Converts text to token ids: `tokenizer_file.py` opens a tokenizer, `texts.py` tokenises and truncates, `threads.py` runs the work on
threads.
"""
