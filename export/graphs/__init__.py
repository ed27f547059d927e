"""Torch models as ONNX graphs.

- `torch_graph.py`: a torch module with named inputs and outputs, and its export with torch's exporter.
- `onnx_file.py`: optimises, saves and describes ONNX files.
- `compact.py`: what layers that are exported as few operators share.
- `token_packing.py`: the tokens of a batch without its padding.
- `hybrid.py`: hybrid attention as one attention operator.
- `packed_encoder.py`: an encoder that computes only the tokens of a batch, not its padding.
- `encoder.py`: the graph of an encoder, reranker or classifier.
- `decoder_operators.py`: ONNX Runtime's operators for recurrences and convolutions.
- `gated_delta.py`, `linear_attention.py`, `sink_window.py`: such layers.
- `decoder_step.py`: the graph of a decoder, for prefill and decode.
- `draw.py`: the graph that draws tokens, a file of the service.
- `encoder_decoder.py`: the two graphs of an encoder-decoder.
- `shared_weights.py`: lets two graphs use one file of weights.
"""
