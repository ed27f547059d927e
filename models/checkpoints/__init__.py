"""Loads checkpoint folders as models.

`published.py` loads published encoders: `families/` describes their settings and tensor names, and `weights.py` copies their tensors
into the model. `wordpiece.py` makes the tokenizer of a folder that has only vocab.txt. `static.py` reads static embeddings.
`search.py` reads how queries and documents become token matrices, and heads for search.
`own_encoder.py` and `decoder.py` load and save folders in this project's own formats, with the functions of `own.py`. `decoder.py` also
loads published decoders, whose chat templates and end tokens `chat.py` reads.
`description.py` builds an encoder from a YAML or JSON file that describes it.
`gguf/` reads GGUF files as such folders.
"""
