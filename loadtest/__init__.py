"""Load tests and benchmarks of the service. `commands.py` adds them to `attnserve`.

`errors.py` is what stops a measurement; `common/` what several measurements need: texts, a running server, processes, reports.
`in_process/` measures engines and ONNX Runtime inside this process or one of its own, without HTTP; everything else measures the service
from outside. `load/` is `attnserve load`: a load of a given shape, its figures and pass marks; `users/` are its clients, which
`locustfile.py` gives to plain Locust. `bench/` compares the service with the bare runtime and with other servers, `capacity/` makes
docs/capacity.md, `faults/` kills and changes a running service, `stress/` overloads one.
"""
