"""Exports a checkpoint folder as a bundle, the directory that `service` serves.

Read in this order:

- `contract/`: the definition of a bundle, its files and its manifest. `service` imports only this folder of the package.
- `errors.py`: the error of an export that failed.
- `checks/`: comparisons of a graph with torch, and the golden examples that a bundle contains.
- `graphs/`: torch models as ONNX graphs.
- `int8/`: int8 graphs of encoders.
- `blocks/`: weights of decoders in blocks of 4 or 8 bits.
- `gpu/`: graphs for GPUs, as a second graph of a bundle.
- `kinds/`: the exporters of encoders, decoders and encoder-decoders.
- `maps/`: attention maps, as a second graph of a bundle and as heatmaps.
- `folder.py`: the directory of a bundle while it is written.
- `bundle.py`: the export itself: load, trace, optimise, check, write.
- `summary.py`: the output of `attnserve inspect`.
- `commands.py`: the commands `export`, `inspect`, `attention` and `compare`.
- `comparison/`: benchmarks of all attention mechanisms.
"""
