"""Makes the clients of `loadtest/users` available to the plain `locust` command. A client waits for an answer before its next request.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000                     # the web UI
    locust -f loadtest/locustfile.py --headless --users 20 --run-time 1m Embed Rerank  # only the classes Embed and Rerank
    locust -f loadtest/locustfile.py --tags stream                                    # only the classes with the tag stream
    locust -f loadtest/locustfile.py,loadtest/shapes.py --load-shape spike --users 50  # the number of users follows a shape

Use `attnserve load` to send requests at a fixed rate, or to compare the figures with pass criteria. If no model of the service can answer
the requests of a class, no user of this class is spawned.
"""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

# Add the repository root to sys.path: Locust adds only this file's folder, and a worker process may start in any working directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gevent
from locust import User, events
from locust.dispatch import UsersDispatcher
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtest.errors import LoadtestError
from loadtest.users import USERS, request_settings
from loadtest.users.client import Client

globals().update({user.__name__: user for user in USERS})  # Locust looks for user classes among this module's names

logger = logging.getLogger("attnserve")


def begin(environment: Environment, **_: object) -> None:
    Answerable.environment = environment
    environment.dispatcher_class = Answerable


def query_models(environment: Environment, **_: object) -> None:
    """Ask the service for its models when a test starts, in every process that sends requests. If it fails, Locust's exit status is 1."""
    try:
        Client.settings = request_settings.from_options(environment.parsed_options, environment.host or str(Client.host))
    except LoadtestError as error:
        Client.settings = None
        give_up(environment, str(error))


def give_up(environment: Environment, why: str) -> None:
    logger.error(why)
    environment.process_exit_code = 1
    if environment.web_ui is None and environment.runner is not None and not isinstance(environment.runner, WorkerRunner):
        gevent.spawn(environment.runner.quit)  # in a new greenlet, because `quit` may end the current one


class Answerable(UsersDispatcher):
    """Spawns users only of classes that have a task with the chosen tags and whose requests a model of the service can answer. Locust alone
    would spawn users of all classes, and the requests of the other classes would fail."""

    environment: ClassVar[Environment]

    def new_dispatch(self, target_user_count: int, spawn_rate: float, user_classes: list[type[User]] | None = None) -> None:
        found = Client.settings
        wanted = [user for user in user_classes or self._original_user_classes if user.tasks]
        able = [user for user in wanted if found is not None and (not issubclass(user, Client) or user.answerable(found))]
        if found is not None and len(able) < len(wanted):
            names = ", ".join(user.__name__ for user in wanted if user not in able)
            logger.warning("not spawned, since no model of %s can answer them: %s", found.url, names)
        if found is not None and not able:
            give_up(self.environment, "no user is left to spawn: choose other classes, tags or models")
        if 0 < target_user_count < len(able):
            logger.warning("%d users are too few for one of each of %d classes: give --users %d", target_user_count, len(able), len(able))
        super().new_dispatch(target_user_count if able else 0, spawn_rate, able or None)

    def _user_gen(self) -> Iterator[str | None]:
        """Yield the class of each next user: first one user of each class, by falling share, because by share alone a few users would be
        of one class. Then always the class that is furthest below its share.

        Locust has no public way to choose classes; `tests/loadtest/test_locust.py` shows whether this one still works.
        """
        total, spawned = sum(user.weight for user in self._user_classes), Counter[str]()
        while True:
            missing = [user for user in self._user_classes if not spawned[user.__name__]] or self._user_classes
            number = spawned.total() + 1
            chosen = max(missing, key=lambda user: (number * user.weight / total - spawned[user.__name__], user.weight))
            spawned[chosen.__name__] += 1
            yield chosen.__name__


events.init_command_line_parser.add_listener(request_settings.add_options)
events.init.add_listener(begin)
events.test_start.add_listener(query_models)
