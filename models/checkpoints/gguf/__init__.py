"""Reads GGUF files, the format of llama.cpp, as Hugging Face folders.

- `header.py`: compares the counts, sizes and offsets of a file with its length, before the package `gguf` reads it.
- `file.py`: the metadata and tensors of a file.
- `config.py`: config.json from the metadata.
- `tensors.py`: the names and row orders of Hugging Face.
- `tokenizer.py`: tokenizer.json from the metadata.
- `unpack.py`: writes all this to a folder.
"""
