"""One exporter for each kind of model.

- `exporter.py`: what an exporter provides.
- `encoder.py`: encoders, rerankers and classifiers.
- `decoder.py`: decoders.
- `encoder_decoder.py`: encoder-decoders.
- `load.py`: loads a checkpoint folder with the exporter of its kind.
"""
