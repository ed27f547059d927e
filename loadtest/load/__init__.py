"""`attnserve load`: Locust against a running service, and the figures of its samples.

In reading order: `kinds.py` (the kinds of clients), `plan.py` (what is sent, as data),
`models.py` (the service's models and tasks), `locust_run.py` (runs Locust in processes of its own, from `loadtest/users/`), `samples.py`
(one line a request), `watch.py` (the service's processes meanwhile), `figures.py` (samples to numbers, stage by stage), `knee.py`,
`flatness.py`, `pass_marks.py` (numbers to verdicts, by `pass_marks.toml`), `plots.py`, `command.py` and `__main__.py` (the command).

Nothing here imports locust: it patches the standard library for its own process, and must not do so for others.
"""
