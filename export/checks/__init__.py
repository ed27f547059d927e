"""Comparisons of ONNX graphs with the torch models they were made of.

- `parity.py`: names, axes and values of any graph; the random inputs of encoders.
- `decoder_parity.py`: a decoder's step graph, and whether its results are independent of batch and chunk sizes.
- `encoder_decoder_parity.py`: the two graphs of an encoder-decoder.
- `bits_per_byte.py`: what a precision costs a decoder, on held-out text.
- `golden_texts.py`: the texts that every export is checked with.
- `golden.py`: these texts with torch's outputs, which a server checks at start.
"""
