"""Load tests and benchmarks of the service. `commands.py` adds them to `attnserve`.

`errors.py` has the error that stops a measurement; `common/` has shared code for texts, servers, processes and reports. `in_process/`
measures engines and ONNX Runtime without HTTP, in this process or a child; everything else measures the service from outside. `load/` is
`attnserve load`: a load of a given shape, its figures and pass criteria; `users/` are its clients, which `locustfile.py` makes available
to plain Locust. `bench/` compares the service with the bare runtime and with other servers, `capacity/` makes docs/capacity.md, `faults/`
kills and changes a running service, `stress/` overloads a service.
"""
