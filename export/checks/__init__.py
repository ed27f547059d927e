"""Comparisons of ONNX graphs with the torch models they were made of.

- `parity.py`: names, axes and values of any graph; the random inputs of encoders.
- `decoder_parity.py`: a decoder's step graph, and whether its results are independent of batch and chunk sizes.
- `bits_per_byte.py`: what a precision costs a decoder, on held-out text.
- `golden.py`: texts and prompts with torch's outputs, which a server checks at start.
"""
