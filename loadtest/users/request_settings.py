"""The settings shared by all requests of a load test: service, models, text lengths. They come from Locust's options or a load plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from locust.argument_parser import LocustArgumentParser

from loadtest.errors import LoadtestError
from loadtest.load import models


@dataclass(frozen=True)
class RequestSettings:
    """The settings of requests. `models` maps a task (embed, complete, chat, rerank) to the model to use. A task that no model of the
    service supports is absent."""

    url: str
    models: Mapping[str, str]
    seed: int | None = None  # seed of texts and choices; None: random
    words: int | None = None  # words in each text to embed; None: random, from a distribution
    max_tokens: int = 128  # largest number of tokens in a stream
    timeout_s: float = 120.0  # longest time until an answer is complete
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}


def add_options(parser: LocustArgumentParser) -> None:
    """Add the requests' options to the command line, `locust.conf`, the environment (LOADTEST_NAME) and the web UI's form."""
    add = parser.add_argument
    add("--model", default="", env_var="LOADTEST_MODEL", help="Models to ask, separated by commas. Default: all models of the service.")
    add("--words", type=int, default=0, env_var="LOADTEST_WORDS", help="Words of every text to embed. 0: a distribution of lengths.")
    add("--max-tokens", type=int, default=128, env_var="LOADTEST_MAX_TOKENS", help="Tokens of a stream.")
    add("--seed", type=int, default=0, env_var="LOADTEST_SEED", help="Seed of texts and choices. 0: other ones each time.")
    add("--request-timeout", type=float, default=120.0, env_var="LOADTEST_REQUEST_TIMEOUT", help="Seconds for a whole answer.")
    add_key(parser)


def add_key(parser: LocustArgumentParser) -> None:
    """Add the API key's option, but not to the web form, whose page would show the key. Workers get it from their master."""
    parser.add_argument(
        "--api-key", default="", env_var="LOADTEST_API_KEY", include_in_web_ui=False, help="API key; better in LOADTEST_API_KEY."
    )


def from_options(options: Any, host: str) -> RequestSettings:
    """Return the settings that Locust's options give. The service at `host` is asked for its models and their tasks. Raises LoadtestError
    for a bad option, or if the service does not answer."""
    parts = urlsplit(host)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise LoadtestError(f"the host {host!r} must have the form http://NAME:PORT or https://NAME:PORT: give it with --host")
    for name, least in (("words", 0), ("max_tokens", 1)):
        if (value := getattr(options, name)) < least:
            raise LoadtestError(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")
    if options.request_timeout <= 0:
        raise LoadtestError(f"--request-timeout is {options.request_timeout:g}, but must be above 0 seconds")
    url = host.rstrip("/")
    names = [name.strip() for name in options.model.split(",") if name.strip()] or models.names(url, options.api_key)
    return RequestSettings(
        url=url,
        models=models.tasks(url, names, options.api_key),
        seed=options.seed or None,
        words=options.words or None,
        max_tokens=options.max_tokens,
        timeout_s=options.request_timeout,
        key=options.api_key,
    )
