"""Measures engines and ONNX Runtime without HTTP. No other folder of loadtest imports models, exporters, engines or ONNX Runtime.

`bare.py` runs an encoder's graph without a server. For decoders, `steps.py` measures the bare step loop (the step graph without an engine)
and `engine.py` the engine. `tiny_models.py` exports models whose computation takes almost no time. Three parts of `attnserve bench` are
here: `static.py` compares static embeddings with sentence-transformers, `published.py` SmolLM2 with transformers and llama.cpp, and
`gpu.py` measures graphs for GPUs.
`retrieval.py` is the part of the benchmark for search. Beside this folder, `evaluate/` opens engines too.
"""
