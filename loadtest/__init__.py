"""Load tests and benchmarks of the service. `commands.py` adds them to `attnserve`.

`errors.py` has the error that stops a measurement; `common/` has shared code for texts, servers, processes and reports. `in_process/`
measures engines and ONNX Runtime without HTTP, in this process or a child; everything else measures the service from outside. `load/` is
`attnserve load`, which sends requests at a rate that follows a chosen shape over time, and compares the figures with pass criteria;
`users/` are its clients, which `locustfile.py` makes available to plain Locust, and `shapes.py` its shapes. `bench/` compares the service
with the bare runtime and with other servers, `faults/` kills processes of a running service, updates it and scales it, `console/` makes a
picture of the console in a browser.
"""
