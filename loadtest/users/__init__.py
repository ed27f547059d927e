"""The clients, as Locust users: one class is one kind of client, and `loadtest/load/kinds.py` lists them. `loadtest/locustfile.py` passes
them to plain Locust, `planned.py` adds the plan of `attnserve load`.

`request_settings.py` has the settings that all requests of a load test share, `client.py` the base class, `embeddings.py`, `streams.py`
and `hostile.py` the kinds, `wire.py` and `crowd.py` idle and slow connections. `recorder.py` writes a sample of each request,
`measurements.py` a table of what streams measure. Only Locust's processes import this package.
"""

from pkgutil import resolve_name

from loadtest.load.kinds import KINDS
from loadtest.users.client import Client

USERS: tuple[type[Client], ...] = tuple(resolve_name(f"loadtest.users.{kind.user}") for kind in KINDS.values())
