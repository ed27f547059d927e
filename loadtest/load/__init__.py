"""`attnserve load`: Locust against a running service, and what its samples say.

In reading order: `plan` (what is sent, as data), `shapes` (how the load goes in time), `models` (what the service offers), `locust_run`
(Locust in processes of its own, from `loadtest/users/`), `samples` (one line a request), `watch` (the service's processes meanwhile),
`figures` (samples to numbers, stage by stage), `knee`, `flatness`, `marks` (numbers to verdicts), `plots`, `command`, `capacity`
(tables of runs).

Nothing here imports locust: it patches the standard library for its own process, and must not do so for others.
"""
