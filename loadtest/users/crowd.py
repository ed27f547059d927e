"""Connections that only hang: some say nothing at all, some have a stream and take it a few bytes at a time."""

import random
from collections.abc import Callable
from contextlib import suppress

import gevent
from gevent.pool import Group

from loadtest.load.plan import Plan, Stage
from loadtest.users.wire import connect, connect_slowly

_SIP_BYTES, _SIP_S = 16, 0.5
# Of each member by chance, so that no moment has many of them: before its first connection, and before another where one was closed.
# HAProxy closes after 10 s of silence (service/haproxy.py): together, a thousand would come back in one moment, to the service and to the
# process that times its other clients.
_FIRST_S, _AGAIN_S = 10.0, 2.0
_TOKENS = 128  # of a slow reader: it takes minutes to read them, and drawing them is no load of its own


class Crowd:
    """As many of both as the stage wants, opened again where the service closes them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._idle, self._slow = Group(), Group()

    def become(self, stage: Stage) -> None:
        for group, wanted, member in ((self._idle, stage.idle, self._say_nothing), (self._slow, stage.slow, self._sip)):
            if not wanted:
                group.kill(block=True)
            for number in range(len(group), wanted):
                draw = random.Random(f"{self._plan.seed} {member.__name__} {number}")
                group.spawn(self._again_and_again, member, draw)

    def _again_and_again(self, member: Callable[[], None], draw: random.Random) -> None:
        gevent.sleep(draw.uniform(0, _FIRST_S))
        while True:
            with suppress(OSError):  # refused or closed: what the service does about a crowd is its own affair
                member()
            gevent.sleep(draw.uniform(0, _AGAIN_S))

    def _say_nothing(self) -> None:
        with connect(self._plan) as connection:
            connection.settimeout(None)
            connection.recv(1)

    def _sip(self) -> None:
        with connect_slowly(self._plan, _TOKENS) as connection:
            while connection.recv(_SIP_BYTES):
                gevent.sleep(_SIP_S)
