"""Code that several measurements share.

`texts.py` has seeded texts, `server.py` starts and stops a server, `wrk.py` runs the load generator (with `bodies.lua`),
`memory.py` and `machine.py` read /proc, `stacks.py` samples the stacks of a process, `report.py` turns figures into rows with verdicts,
`terminal.py` shows progress and tables.
"""
