"""Code that several measurements share.

`texts.py` has seeded texts, `server.py` is the harness that starts, watches and kills programs, `redis.py` starts a Redis, `wrk.py` runs
the load generator (with `bodies.lua`), `memory.py` and `machine.py` read /proc. `benchmark.py` measures the sides of a benchmark in turns,
`report.py` turns figures into rows with verdicts, `terminal.py` shows progress.
"""
