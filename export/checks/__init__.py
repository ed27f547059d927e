"""Comparisons of ONNX graphs with the torch models they were exported from.

- `parity.py`: compares names, axes and values of any graph; generates the random inputs of encoders.
- `decoder_parity.py`: compares a decoder's step graph with torch, and checks that its results do not depend on batch and chunk sizes.
- `full_attention.py`: compares a decoder with a window with the original one.
- `encoder_decoder_parity.py`: compares the two graphs of an encoder-decoder with torch.
- `bits_per_byte.py`: measures how much a decoder loses in a lower precision, on held-out text.
- `answers.py`: measures how near a decoder in a lower precision stays to the answers of its weights.
- `golden_texts.py`: the texts used to check every export.
- `golden.py`: these texts with torch's outputs, which a server checks at start.
"""
