"""The training of an encoder-decoder that reads a number in words and writes its digits: `words.py` (numbers, their words in eight
languages, and the held-out numbers), `tokens.py` (characters as tokens), `config.py`, `batches.py`, `evaluation.py` (exact matches) and
`task.py`, which combines them.
"""
