"""Load tests and benchmarks of the service. `commands.py` adds them to `attnserve`.

`bench/` and `in_process/` are `attnserve bench`, `evaluate/` is `attnserve evaluate`, `faults/` kills processes of a running service,
`load/` is `attnserve load`, and `users/` are its clients, which `locustfile.py` makes available to plain Locust, and `shapes.py` its
shapes. `common/` is what they share, and `errors.py`
has the error that stops a measurement.
"""
