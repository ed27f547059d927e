"""The clients, as Locust users: one class is one kind of client, and `loadtest/load/kinds.py` lists them. `loadtest/locustfile.py` passes
them to plain Locust, `planned.py` adds the plan of `attnserve load`.

Only Locust's processes import this package.
"""

from pkgutil import resolve_name

from loadtest.load.kinds import KINDS
from loadtest.users.client import Client

USERS: tuple[type[Client], ...] = tuple(resolve_name(f"loadtest.users.{kind.user}") for kind in KINDS.values())
