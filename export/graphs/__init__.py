"""Torch models as ONNX graphs.

- `packed_encoder.py`: an encoder that computes only the tokens of a batch, not its padding.
- `encoder.py`: the graph of an encoder, reranker or classifier; optimising, saving and describing graphs.
- `decoder_operators.py`: ONNX Runtime's operators in place of recurrences and convolutions.
- `decoder_step.py`: the graph of a decoder, for prefill and decode.
- `encoder_decoder.py`: the two graphs of an encoder-decoder.
- `shared_weights.py`: two graphs over one file of weights.
"""
