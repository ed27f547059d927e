"""Defines all settings of the service, as one object that cannot be changed.

A value is read from the command line, else from `ATTNSERVE_*` in the environment, else from a YAML file, else it is the default here. An
unknown key or an invalid value prevents the start.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, AnyHttpUrl, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationInfo, field_validator
from pydantic_core import ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from service.errors import AttnserveError

PREFIX = "ATTNSERVE_"
IN_MEMORY = "memory"  # the value of the setting `states` that keeps states in memory and not on disk
STATES_PASSWORD = "ATTNSERVE_STATES_PASSWORD"  # not a setting, because Ray stores all settings, and commands can print them
CONFIG_VARIABLE = f"{PREFIX}CONFIG"


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,?#@*]+")  # browsers send "null" for a page without an origin


class SettingsError(AttnserveError, ValueError):
    """A setting is invalid. The message is one sentence with the setting's name, its value and the accepted values."""


def _split(value: Any) -> Any:
    """Parse a list written as `a,b` or `["a", "b"]`, the forms in environment variables and --set. Returns values that are not strings
    unchanged.
    """
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError('it begins like a JSON list but is not one: write ["a", "b"], or a,b') from None
    return [part.strip() for part in value.split(",") if part.strip()]


def _origin(value: str) -> str:
    """Return an origin as browsers send it: in lower case, without a slash at the end. Raises ValueError if the text is not an origin."""
    origin = value.strip().rstrip("/").lower()
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{origin!r} is not an origin: write scheme://host or scheme://host:port, without a path, or *")
    return origin


def _resolved(path: Path) -> Path:
    try:
        return path.expanduser().resolve()  # absolute, because a replica runs in another directory
    except (OSError, RuntimeError) as error:  # raised if a link points to itself, a name is too long, or a user is unknown
        raise ValueError(f"a bundle's path cannot be resolved: {error}") from None


def _absolute(path: Path | None) -> Path | None:
    return path and Path(os.path.abspath(path.expanduser()))  # noqa: PTH100  # links are kept: their targets change


def _store(location: str) -> str:
    if location == IN_MEMORY:
        return location
    if "://" in location:
        url = urlsplit(location)
        if url.scheme not in ("redis", "rediss") or not url.hostname:
            raise ValueError("it names a directory, `memory`, or a URL redis://[USER@]HOST:PORT/DB or rediss://")
        if url.password is not None or "password=" in url.query:
            raise ValueError(f"a URL with a password would be shown and stored in many places: put the password into {STATES_PASSWORD}")
        return location
    if not location:
        raise ValueError("it is empty: name a directory, or `memory`")
    return str(_absolute(Path(location)))  # a replica runs in another directory


def _long_enough(key: SecretStr) -> SecretStr:
    if len(key.get_secret_value()) < 8:
        raise ValueError("an API key needs at least 8 characters")
    return key


_Count = Annotated[int, Field(ge=1)]
_Bytes = Annotated[int, Field(ge=1024)]
_Seconds = Annotated[float, Field(gt=0, le=3600)]
_Wait = Annotated[float, Field(ge=0, le=86_400)]
_Replicas = Annotated[int, Field(ge=1, le=1000)]
_MostReplicas = Annotated[int | None, Field(ge=1, le=10_000)]
_Timeout = Annotated[float, Field(gt=0, le=86_400)]
Item = TypeVar("Item")
Listed = Annotated[tuple[Item, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseModel):
    """The settings of one service. `load` reads them from all sources; tests and replicas construct them from values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bundles: Listed[Annotated[Path, AfterValidator(_resolved)]] = Field(
        (), description="Bundle directories to serve; the first of a kind is the default for its kind."
    )
    aliases: dict[str, str] = Field({}, description="Other names of models, as ALIAS=NAME; a mapping in YAML, JSON in the environment.")
    default_model: Listed[str] = Field(
        (), description="Models that answer requests for unknown names: the first whose kind fits the route. Unset: unknown names get 404."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    api_keys: Listed[Annotated[SecretStr, AfterValidator(_long_enough)]] = Field(
        (),
        description="Keys accepted as `Authorization: Bearer KEY`, `api-key` or `x-api-key` (better in ATTNSERVE_API_KEYS). Without "
        "keys, all may call.",
    )
    # An empty value means that there is no such file.
    api_keys_file: Annotated[Path | None, BeforeValidator(lambda path: path or None), AfterValidator(_absolute)] = Field(
        None, description="JSON file of hashes of more keys, with tenants and limits; see `attnserve key`. Read again when it changes."
    )
    cors_origins: Listed[Annotated[str, AfterValidator(_origin)]] = Field(
        (), description="Origins of pages that may call from a browser, such as https://app.example; `*` allows all, none turns CORS off."
    )

    max_body_bytes: _Bytes = Field(32 * 1024 * 1024, description="Largest request body, in bytes.")
    max_pending_bytes: _Bytes = Field(
        256 * 1024 * 1024, description="Most bytes of all request bodies, and of all large answers; over it or a client's share: 429."
    )
    max_answer_bytes: _Bytes = Field(
        64 * 1024 * 1024, description="Largest answer in bytes, estimated before it is computed; over it: 413."
    )
    min_body_bytes_per_s: _Count = Field(
        8192, description="Slowest upload of a body, in bytes a second, after its first `body_grace_s` seconds; below it: 408."
    )
    body_grace_s: _Seconds = Field(5.0, description="Longest pause of an upload, in seconds.")
    max_client_batch: int = Field(2048, ge=1, le=1_000_000, description="Most inputs in one request.")
    max_input_characters: int = Field(1_000_000, ge=1000, description="Most characters of one input, before truncation.")
    max_queue_tokens: _Count = Field(524_288, description="Most tokens queued for one model; over it: 429.")
    max_wait_s: _Wait = Field(
        1.0, description="Longest estimated wait of an interactive request in seconds; over it: 429. An empty queue accepts any request."
    )
    max_bulk_wait_s: _Wait = Field(30.0, description="The same for bulk requests.")
    max_batch_tokens: _Count | None = Field(
        None, description="Most tokens of one runtime call, padding included. Unset: 512 on a CPU, 16384 on a GPU."
    )
    bulk_inputs: _Count = Field(32, description="A request with more inputs than this is bulk, unless it names its lane.")
    bulk_delay_s: float = Field(2.0, ge=0, le=3600, description="Seconds for which interactive requests may overtake a bulk request.")
    request_timeout_s: _Timeout = Field(300.0, description="Deadline of a request that sets none, in seconds.")
    stream_heartbeat_s: _Seconds = Field(
        15.0, description="Seconds of silence after which a stream sends a comment, so that proxies keep it open."
    )
    stream_interval_s: float = Field(
        0.03,
        ge=0,
        le=10,
        description="Least seconds between two messages of a stream, except the first and the last. From 8 streams on, it is 4 ms a "
        "stream if that is more, at most 0.25 s. 0: a message per token.",
    )
    stream_stall_s: _Seconds = Field(60.0, description="Seconds after which a client that reads nothing of its stream is disconnected.")
    slots: int = Field(32, ge=1, le=4096, description="Sequences that a decoder generates at the same time.")
    slot_bytes: _Bytes = Field(
        1024**3,
        description="Most memory for the states of sequences that a decoder generates at the same time; it has fewer slots if they "
        "would need more, at least one.",
    )
    max_prompt_tokens: _Count = Field(131_072, description="Most tokens of a prompt.")
    states: Annotated[str, AfterValidator(_store)] = Field(
        "~/.local/state/attnserve",
        validate_default=True,
        description="Where states, responses, and limits and usage of tenants are kept: a directory, `memory` (lost with the process), or "
        "a URL redis://HOST:PORT/DB (its password in ATTNSERVE_STATES_PASSWORD).",
    )
    max_states: _Count = Field(10_000, description="Most states of one tenant.")
    max_state_bytes: _Bytes = Field(4 * 1024**3, description="Most bytes of one tenant's states; the least recently used give way.")
    state_ttl_s: float = Field(
        2_592_000.0, gt=0, le=3_153_600_000, description="Seconds after which a state expires whose request sets no `ttl_s`."
    )
    max_background: _Count = Field(64, description="Most background responses that one process generates for one tenant.")
    prefix_cache_bytes: int = Field(
        256 * 1024**2, ge=0, description="Memory for the states after earlier prompts, from which equal beginnings continue. 0: none."
    )
    shared_prefix_bytes: int = Field(
        64 * 1024**2,
        ge=0,
        description="Room in the store, for each tenant, for the states after long prompts that the generators of profile split read for "
        "each other. 0: none.",
    )
    hot_state_bytes: int = Field(256 * 1024**2, ge=0, description="Memory for states that were used last, so that they are not read again.")
    default_max_tokens: int = Field(
        4096, ge=1, le=1_000_000, description="Most tokens of a chat answer or a response if the request sets no limit."
    )
    allow_special_tokens: bool = Field(
        False, description="Recognise special tokens, such as [SEP] or <|endoftext|>, in the texts of requests. Off: they are plain text."
    )
    any_tokenizer_pattern: bool = Field(
        False, description="Serve also tokenizers with regular expressions that no published one has. Some texts may take them for ever."
    )
    auto_truncate: bool = Field(True, description="Truncate inputs that exceed the model's limit, unless the request sets this itself.")
    cache_bytes: int = Field(32 * 1024 * 1024, ge=0, description="Bytes of the cache of vectors; 0 turns it off.")

    threads: int | None = Field(
        None, ge=1, le=1024, description="Runtime threads of each replica. Unset: a share of the CPUs that affinity and cgroup quota allow."
    )
    provider: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where encoders and decoders compute; auto takes a GPU that works. Encoder-decoders compute on the CPU."
    )
    gpu_memory_gib: float | None = Field(
        None, gt=0, le=1024, description="Most GPU memory of each bundle in a process, in GiB. Unset: all."
    )
    stuck_after_s: _Timeout = Field(120.0, description="Seconds after which a replica whose runtime call has not ended is replaced.")
    profile: Literal["single", "split"] = Field(
        "single", description="single: one process answers; split: gateways in front of pools of replicas that compute."
    )
    gateways: _Replicas = Field(1, description="Fewest replicas that take requests; profile split.")
    encoders: _Replicas = Field(1, description="Fewest replicas that compute vectors and scores; profile split.")
    generators: _Replicas = Field(1, description="Fewest replicas that generate text; profile split.")
    max_gateways: _Replicas | None = Field(
        None, description="Upper bound when autoscaling gateways, by processor time. Unset: fixed number."
    )
    max_encoders: _MostReplicas = Field(
        None, description="Upper bound when autoscaling encoder replicas, by requested tokens. Unset: fixed number."
    )
    max_generators: _MostReplicas = Field(
        None, description="Upper bound when autoscaling generator replicas, by requested slots. Unset: fixed number."
    )
    replica_gpus: float | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs, or share of a GPU, of each computing replica; profile split. Unset: 1 if provider=cuda, else 0.",
    )
    lean: bool = Field(
        False, description="Without HAProxy: the replica's own server accepts connections, which saves one hop and HAProxy's memory."
    )
    drain_timeout_s: float = Field(30.0, ge=0, le=3600, description="Seconds that SIGTERM waits for accepted requests to finish.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged: debug, info, warning or error."
    )
    otlp_endpoint: AnyHttpUrl | None = Field(
        None, description="Address for traces over OTLP/HTTP, such as http://collector:4318; needs attnserve[trace]. Unset: no traces."
    )
    access_log: bool = Field(False, description="Log every request, not only failed ones.")
    console: bool = Field(True, description="Serve the console at / to browsers. Off: / is JSON for all.")
    development: bool = Field(
        False, description="Allow requests to kill the process that generates, to see streams continue. Not for a service that others use."
    )

    @field_validator("max_gateways", "max_encoders", "max_generators")
    @classmethod
    def _not_below_the_fewest(cls, value: int | None, info: ValidationInfo) -> int | None:
        fewest = str(info.field_name).removeprefix("max_")
        if value is not None and value < info.data.get(fewest, 1):
            raise ValueError(f"it is less than {fewest}={info.data[fewest]}")
        return value

    @property
    def needs_key(self) -> bool:
        """Return whether requests need an API key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    def most(self, role: str) -> int:
        """Return the largest number of replicas that a role may have. The roles are gateways, encoders and generators."""
        fixed: int = getattr(self, role)
        return max(fixed, getattr(self, f"max_{role}") or 0)


class _Sources(BaseSettings, Settings):
    """Reads each setting from the command line's flags, else from the environment, else from a file."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: Any, **sources: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = os.environ.get(CONFIG_VARIABLE)
        own = sources["init_settings"], sources["env_settings"]
        return (*own, YamlConfigSettingsSource(settings_cls, file)) if file else own


def default_of(name: str) -> str:
    """Return the default of a setting as help texts and docs/settings.md show it."""
    value = Settings.model_fields[name].default
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(int(value) if isinstance(value, float) else value or "none")


def load(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Return the settings of this process. `flags` contains only the settings that were given on the command line. Raises SettingsError."""
    if config:
        os.environ[CONFIG_VARIABLE] = str(config)
    if file := os.environ.get(CONFIG_VARIABLE):
        _check_yaml(Path(file))
    try:
        json.loads(aliases := os.environ.get(f"{PREFIX}ALIASES", "{}"))
    except ValueError:
        raise SettingsError(f'{PREFIX}ALIASES={aliases!r} is not accepted: it must be JSON, such as {{"name": "model"}}') from None
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | {CONFIG_VARIABLE, STATES_PASSWORD}
    if unknown := sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known):
        raise SettingsError(f"{unknown[0]} is not a setting. Settings: {', '.join(sorted(known))}")
    try:
        return Settings.model_validate(dict(_Sources(**flags)))
    except ValueError as error:
        raise SettingsError(_sentence(error)) from None  # pydantic's message about a bad key contains the key


def check_names(settings: Settings, names: Sequence[str]) -> None:
    """Raise SettingsError if two bundles have the same name, or if an alias or default_model names no bundle. `names` are the names of all
    bundles.
    """
    first: dict[str, Path] = {}
    for bundle, name in zip(settings.bundles, names, strict=True):
        if name in first:
            raise SettingsError(f"{bundle} and {first[name]} are both called {name}: export one under another --name")
        first[name] = bundle
    named = [(f"alias {alias}", name, name) for alias, name in settings.aliases.items()]
    named += [("default_model", name, settings.aliases.get(name, name)) for name in settings.default_model]
    for where, name, served in named:
        if served not in first:
            raise SettingsError(f"{where} names model {name}, which is not served. Served: {', '.join(names)}")


def _check_yaml(file: Path) -> None:
    if not file.is_file():
        raise SettingsError(f"{file} does not exist: --config and {CONFIG_VARIABLE} name a YAML file")
    try:
        content = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        raise SettingsError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise SettingsError(f"{file} is not a YAML mapping of settings to values")


def freeze(settings: Settings) -> str:
    """Return the settings as JSON for another process of this service. The JSON contains the API keys, so it must not be logged."""
    return json.dumps({**settings.model_dump(mode="json"), "api_keys": [key.get_secret_value() for key in settings.api_keys]})


# Names of the settings that can change while the service runs, because they are read for each request.
LIVE = (
    "access_log",
    "auto_truncate",
    "body_grace_s",
    "bulk_inputs",
    "default_max_tokens",
    "log_level",
    "max_answer_bytes",
    "max_body_bytes",
    "max_client_batch",
    "max_input_characters",
    "max_pending_bytes",
    "min_body_bytes_per_s",
    "request_timeout_s",
    "stream_heartbeat_s",
    "stream_interval_s",
    "stream_stall_s",
)


def live(settings: Settings) -> dict[str, Any]:
    """Return the values of the live settings, for Serve's `user_config`."""
    return settings.model_dump(mode="json", include=set(LIVE))


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Return a copy of the settings with other values of live settings. Raises SettingsError if a setting is not live or a value is bad."""
    if unknown := sorted(set(changes) - set(LIVE)):
        raise SettingsError(f"{unknown[0]} cannot change while the service runs. Settings that can: {', '.join(LIVE)}")
    try:
        return Settings.model_validate({**json.loads(freeze(settings)), **changes})
    except ValueError as error:
        raise SettingsError(_sentence(error)) from None


def _sentence(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ")  # pydantic puts this prefix before the messages of our own validators
    name = ".".join(map(str, first["loc"])) or "settings"
    if first["type"] == "extra_forbidden":
        return f"{name} is not a setting. Settings: {', '.join(sorted(Settings.model_fields))}"
    if name.split(".")[0] in ("api_keys", "states"):  # their values may be secrets
        return f"{name.split('.')[0]} is not accepted: {said}"
    return f"{name}={first['input']!r} is not accepted: {said}"
