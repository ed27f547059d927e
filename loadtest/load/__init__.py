"""`attnserve load`: loads a running service with Locust, and computes figures from the samples (the measurements of single requests).

In reading order: `kinds.py` (the kinds of clients), `shapes.py` (how the load changes over time), `plan.py` (what is sent, as data),
`models.py` (the service's models and tasks), `locust_run.py` (starts Locust's processes, whose clients are in `loadtest/users/`),
`samples.py` (files of samples), `watch.py` (observes the service's processes), `figures.py` (computes figures per stage), `knee.py`
(the highest rate without overload), `flatness.py` (finds leaks), `pass_marks.py` (verdicts, by the criteria in `pass_marks.toml`),
`command.py` (the command).

No file here imports locust, because the import patches the standard library of its process.
"""
