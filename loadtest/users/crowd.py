"""Opens many connections beside the measured clients: idle ones send nothing, slow readers read a stream a few bytes at a time."""

import random
from collections.abc import Callable
from contextlib import suppress

import gevent
from gevent.pool import Group

from loadtest.load.plan import Stage
from loadtest.users.request_settings import RequestSettings
from loadtest.users.wire import connect, connect_slowly

_SIP_BYTES, _SIP_S = 16, 0.5
# Upper bounds of the random pauses before a first connection and before each reconnection. HAProxy closes idle connections after 10 s
# (service/deployment/haproxy.py). Without pauses, a thousand connections would be reopened at once and delay the measured clients.
_FIRST_S, _AGAIN_S = 10.0, 2.0
_TOKENS = 128  # tokens in a slow reader's stream; they are generated fast, but reading them takes minutes


class Crowd:
    """The idle connections and slow readers that a stage of a load test has. If the service closes a connection, it is opened again."""

    def __init__(self, settings: RequestSettings) -> None:
        self._settings = settings
        self._idle, self._slow = Group(), Group()

    def become(self, stage: Stage) -> None:
        for group, wanted, member in ((self._idle, stage.idle, self._say_nothing), (self._slow, stage.slow, self._sip)):
            if not wanted:
                group.kill(block=True)
            for number in range(len(group), wanted):
                draw = random.Random(f"{self._settings.seed} {member.__name__} {number}")
                group.spawn(self._again_and_again, member, draw)

    def _again_and_again(self, member: Callable[[], None], draw: random.Random) -> None:
        gevent.sleep(draw.uniform(0, _FIRST_S))
        while True:
            with suppress(OSError):  # the service may refuse or close these connections
                member()
            gevent.sleep(draw.uniform(0, _AGAIN_S))

    def _say_nothing(self) -> None:
        with connect(self._settings) as connection:
            connection.settimeout(None)
            connection.recv(1)

    def _sip(self) -> None:
        with connect_slowly(self._settings, _TOKENS) as connection:
            while connection.recv(_SIP_BYTES):
                gevent.sleep(_SIP_S)
