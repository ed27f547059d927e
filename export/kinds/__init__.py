"""One exporter for each kind of model.

- `decoder.py`: decoders.
- `encoder_decoder.py`: encoder-decoders.
"""
