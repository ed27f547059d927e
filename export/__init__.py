"""A checkpoint folder becomes a bundle, the directory that `service` serves.

Read in this order:

- `contract.py`: what a bundle is, its files and its manifest. This is all that `service` imports of this package.
- `errors.py`: the error of an export that is refused.
- `checks/`: comparisons of a graph with torch, and the golden examples that a bundle carries.
- `graphs/`: torch models as ONNX graphs.
- `int8/`: int8 graphs of encoders and decoders.
- `kinds/`: what differs between encoders, decoders and encoder-decoders.
- `maps/`: attention maps, as a second graph of a bundle and as heatmaps.
- `folder.py`: the directory of a bundle while it is written.
- `bundle.py`: the export itself: load, trace, optimise, check, write.
- `kv_cache/`: softmax decoders with a KV cache, for benchmarks; they are not bundles.
- `summary.py`: what `attnserve inspect` prints.
- `commands.py`: the commands `export`, `inspect`, `attention` and `compare`.
- `comparison/`: measurements of all attention mechanisms side by side.
"""
