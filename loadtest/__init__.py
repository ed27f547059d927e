"""Load tests and benchmarks of the service. `commands.py` adds them to `attnserve`.

`errors.py` has the error that stops a measurement; `common/` has shared code for texts, programs, processes and reports. `load/` is
`attnserve load`, which sends requests at a rate that follows a chosen shape over time, and compares the figures with pass criteria;
`users/` are its clients, which `locustfile.py` makes available to plain Locust, and `shapes.py` its shapes. `bench/` is `attnserve bench`,
`in_process/` measures engines and ONNX Runtime without HTTP, `evaluate/` is `attnserve evaluate`, which measures how well vectors find
documents, and `faults/` kills processes of a running service.
"""
