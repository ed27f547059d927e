"""Measures engines and ONNX Runtime without HTTP: the upper bound of what the service can reach. The only folder of loadtest that imports
models, exporters, engines or ONNX Runtime.

`bare.py` runs an encoder's graph. For decoders, `steps.py` measures the bare step loop, `engine.py` the engine, `latency.py` the time
between tokens, `states.py` states that are restored, `checkpoints.py` the cost of checkpoints, `prefixes.py` prompts whose state another
process has stored, `stores.py` the stores of states. `shapes.py` defines decoders with random weights and `decoders.py` exports them,
`twin.py` measures a decoder with softmax attention, `gpt2.py` a GPT-2 of transformers, `batches.py` the throughput by batch size,
`draws.py` a draw of the sampler. `tiny_models.py` exports models whose computation takes almost no time.
"""
