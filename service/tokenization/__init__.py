"""Text to token ids: `tokenizer_file.py` opens a bundle's tokenizer, `texts.py` encodes and cuts, `threads.py` does so on threads."""
