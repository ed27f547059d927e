"""The settings that all requests of a run share: service, models, lengths of texts. From Locust's options, or from a plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from locust.argument_parser import LocustArgumentParser

from loadtest.errors import LoadtestError
from loadtest.load import models


@dataclass(frozen=True)
class Asking:
    """`models` has the model for each task (embed, complete, chat, rerank); a task that no model can do is absent."""

    url: str
    models: Mapping[str, str]
    seed: int | None = None  # of texts and choices; None: other ones each time
    words: int | None = None  # of every text to embed; None: a distribution
    max_tokens: int = 128  # of a stream
    timeout_s: float = 120.0  # for a whole answer
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}


def add_options(parser: LocustArgumentParser) -> None:
    """Options of the requests, for the command line, `locust.conf`, LOADTEST_NAME in the environment, and the form of the web UI."""
    add = parser.add_argument
    add("--model", default="", env_var="LOADTEST_MODEL", help="Models to ask, separated by commas. Default: all models of the service.")
    add("--words", type=int, default=0, env_var="LOADTEST_WORDS", help="Words of every text to embed. 0: a distribution of lengths.")
    add("--max-tokens", type=int, default=128, env_var="LOADTEST_MAX_TOKENS", help="Tokens of a stream.")
    add("--seed", type=int, default=0, env_var="LOADTEST_SEED", help="Seed of texts and choices. 0: other ones each time.")
    add(
        "--request-timeout",
        type=float,
        default=120.0,
        env_var="LOADTEST_REQUEST_TIMEOUT",
        help="Seconds for a whole answer.",
    )
    add_key(parser)


def add_key(parser: LocustArgumentParser) -> None:
    """Not in the form, whose page would carry the key. Workers get it from their master."""
    parser.add_argument(
        "--api-key", default="", env_var="LOADTEST_API_KEY", include_in_web_ui=False, help="API key; better in LOADTEST_API_KEY."
    )


def from_options(options: Any, host: str) -> Asking:
    """Ask the service at `host` for its models and their tasks. Raises LoadtestError for a bad option, or if it does not answer."""
    parts = urlsplit(host)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise LoadtestError(f"the host is {host!r}, and it has to be http://NAME:PORT or https://NAME:PORT: give it with --host")
    for name, least in (("words", 0), ("max_tokens", 1)):
        if (value := getattr(options, name)) < least:
            raise LoadtestError(f"--{name.replace('_', '-')} is {value}, and {least} is the least")
    if options.request_timeout <= 0:
        raise LoadtestError(f"--request-timeout is {options.request_timeout:g}, and it has to be more than 0 seconds")
    url = host.rstrip("/")
    names = [name.strip() for name in options.model.split(",") if name.strip()] or models.names(url, options.api_key)
    return Asking(
        url=url,
        models=models.tasks(url, names, options.api_key),
        seed=options.seed or None,
        words=options.words or None,
        max_tokens=options.max_tokens,
        timeout_s=options.request_timeout,
        key=options.api_key,
    )
