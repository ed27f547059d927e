"""Measures engines and ONNX Runtime without HTTP: the upper bound of what the service can reach. No other folder of loadtest imports
models, exporters, engines or ONNX Runtime.

`bare.py` runs an encoder's graph, `gpu.py` the graphs for GPUs. For decoders, `steps.py` measures the bare step loop (the step graph
without an engine), `engine.py` the engine, `latency.py` the time between tokens, `states.py` states that are restored, `checkpoints.py` the
cost of checkpoints, `prefixes.py` prompts whose state another engine has stored, `stores.py` the stores of states. `shapes.py` defines
decoders with random weights and `decoders.py` exports them, `twin.py` measures a decoder with softmax attention, `gpt2.py` a GPT-2 of
transformers, `batches.py` the throughput by batch size.
`static.py` compares static embeddings with sentence-transformers, `published.py` a published decoder with transformers and
llama.cpp. `tiny_models.py` exports models whose computation takes almost no time.
"""
