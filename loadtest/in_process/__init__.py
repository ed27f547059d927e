"""Measures engines and ONNX Runtime without HTTP: the upper bound of what the service can reach. The only folder of loadtest that imports
models, exporters, engines or ONNX Runtime.

`bare.py` runs an encoder's graph. For decoders, `steps.py` is the bare step loop, `engine.py` the engine on top of it, `latency.py` the
time between tokens; `shapes.py` and `decoders.py` define and export decoders with random weights, `twin.py` is the same decoder with
softmax attention, and the time of a step of both along one sequence, `gpt2.py` a GPT-2 of transformers, `batches.py` throughput by batch.
"""
