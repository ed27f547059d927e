"""Connections that only hang: some say nothing at all, some have a stream and take it a few bytes at a time."""

from collections.abc import Callable
from contextlib import suppress

import gevent
from gevent.pool import Group

from loadtest.load.plan import Plan, Stage
from loadtest.users.wire import connect, connect_slowly

_SIP_BYTES, _SIP_S = 16, 0.5
_AGAIN_S = 1.0  # before a connection that was closed is opened again


class Crowd:
    """As many of both as the stage wants, opened again where the service closes them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._idle, self._slow = Group(), Group()

    def become(self, stage: Stage) -> None:
        for group, wanted, member in ((self._idle, stage.idle, self._say_nothing), (self._slow, stage.slow, self._sip)):
            if not wanted:
                group.kill(block=True)
            for _ in range(wanted - len(group)):
                group.spawn(self._again_and_again, member)

    def _again_and_again(self, member: Callable[[], None]) -> None:
        while True:
            with suppress(OSError):  # refused or closed: what the service does about a crowd is its own affair
                member()
            gevent.sleep(_AGAIN_S)

    def _say_nothing(self) -> None:
        with connect(self._plan) as connection:
            connection.settimeout(None)
            connection.recv(1)

    def _sip(self) -> None:
        with connect_slowly(self._plan) as connection:
            while connection.recv(_SIP_BYTES):
                gevent.sleep(_SIP_S)
