"""Everything that can be set, in one frozen object.

A value comes from the command line, then from `ATTNSERVE_*` in the environment, then from a YAML file, then from the default here. An
unknown key or a bad value stops the start.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AnyHttpUrl, BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from service.errors import AttnserveError

PREFIX = "ATTNSERVE_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,?#@*]+")  # "null" is what pages without an origin send


class SettingsError(AttnserveError, ValueError):
    """One sentence: which setting, what it was given, what it takes."""


class Settings(BaseModel):
    """Settings of one service. `load` reads them from all sources; a test or a replica builds them from values alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bundles: Annotated[tuple[Path, ...], NoDecode] = Field(
        (), description="Bundle directories to serve; the first of a kind is the default for its kind."
    )
    aliases: dict[str, str] = Field({}, description="Other names of models, as ALIAS=NAME; a mapping in YAML, JSON in the environment.")
    default_model: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Models that answer requests for unknown names: the first whose kind fits the route. Unset: unknown names get 404.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (),
        description="Keys accepted as `Authorization: Bearer KEY` (better in ATTNSERVE_API_KEYS). Without keys, all may call.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="JSON file of more keys, by their hashes, with tenants and limits; see `attnserve key`. Read again when it changes.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins of pages that may call from a browser, such as https://app.example; `*` allows all, none turns CORS off.",
    )

    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024, description="Largest request body, in bytes.")
    max_pending_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Most bytes of all request bodies together, and of all large answers together; over it or a client's share 429.",
    )
    max_answer_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="Largest answer in bytes, estimated before it is computed; over it 413."
    )
    min_body_bytes_per_s: int = Field(
        8192,
        ge=1,
        description="Slowest accepted upload of a body, in bytes a second, after its first `body_grace_s` seconds; slower ones get 408.",
    )
    body_grace_s: float = Field(5.0, gt=0, le=3600, description="Longest pause of an upload, in seconds.")
    max_client_batch: int = Field(2048, ge=1, le=1_000_000, description="Most inputs in one request.")
    max_input_characters: int = Field(1_000_000, ge=1000, description="Most characters of one input, before truncation.")
    max_queue_tokens: int = Field(524_288, ge=1, description="Most tokens queued for one model; over it 429.")
    max_wait_s: float = Field(
        1.0,
        ge=0,
        le=86_400,
        description="Longest wait of an interactive request in seconds, by measured throughput; over it 429. An empty queue accepts any.",
    )
    max_bulk_wait_s: float = Field(30.0, ge=0, le=86_400, description="The same for bulk requests.")
    max_batch_tokens: int | None = Field(
        None, ge=1, description="Most tokens of one runtime call, padding included. Unset: 512 on a CPU, 16384 on a GPU."
    )
    bulk_inputs: int = Field(32, ge=1, description="A request with more inputs than this is bulk, unless it names its lane.")
    bulk_delay_s: float = Field(2.0, ge=0, le=3600, description="Seconds for which interactive requests may overtake a bulk request.")
    request_timeout_s: float = Field(300.0, gt=0, le=86_400, description="Deadline of a request that sets none, in seconds.")
    stream_heartbeat_s: float = Field(
        15.0, gt=0, le=3600, description="A stream that is silent for this many seconds sends a comment, so that proxies keep it open."
    )
    stream_interval_s: float = Field(
        0.03,
        ge=0,
        le=10,
        description="Seconds between two messages of a stream; its first token and its end are sent at once. 0: each token by itself.",
    )
    stream_stall_s: float = Field(
        60.0, gt=0, le=3600, description="Seconds after which a client that reads nothing of its stream is disconnected."
    )
    slots: int = Field(32, ge=1, le=4096, description="Sequences that a decoder continues at the same time.")
    max_prompt_tokens: int = Field(131_072, ge=1, description="Most tokens of a prompt.")
    default_max_tokens: int = Field(
        4096, ge=1, le=1_000_000, description="Most tokens of a chat answer or a response if the request sets no limit."
    )
    allow_special_tokens: bool = Field(
        False, description="Recognise special tokens, such as [SEP] or <|endoftext|>, in the texts of requests. Off: they are plain text."
    )
    auto_truncate: bool = Field(
        True, description="Truncate inputs that are longer than the model's limit, unless the request sets this itself."
    )
    cache_bytes: int = Field(32 * 1024 * 1024, ge=0, description="Bytes of the cache of vectors; 0 turns it off.")

    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Runtime threads of each replica. Unset: the CPUs that affinity and cgroup quota allow, shared out.",
    )
    provider: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where encoders and decoders compute; auto takes a GPU that works. Encoder-decoders compute on the CPU."
    )
    gpu_memory_gib: float | None = Field(
        None, gt=0, le=1024, description="Most GPU memory of each bundle in a process, in GiB. Unset: all there is."
    )
    stuck_after_s: float = Field(
        120.0, gt=0, le=86_400, description="Seconds after which a replica whose runtime call has not ended is replaced."
    )
    profile: Literal["single", "split"] = Field(
        "single", description="single: one process answers; split: gateways in front of pools of replicas that compute."
    )
    gateways: int = Field(1, ge=1, le=1000, description="Replicas that take requests, at least; profile split.")
    encoders: int = Field(1, ge=1, le=1000, description="Replicas that compute vectors and scores, at least; profile split.")
    generators: int = Field(1, ge=1, le=1000, description="Replicas that generate text, at least; profile split.")
    max_gateways: int | None = Field(
        None, ge=1, le=1000, description="Upper bound when autoscaling gateways, by processor time. Unset: fixed number."
    )
    max_encoders: int | None = Field(
        None, ge=1, le=10_000, description="Upper bound when autoscaling encoder replicas, by requested tokens. Unset: fixed number."
    )
    max_generators: int | None = Field(
        None, ge=1, le=10_000, description="Upper bound when autoscaling generator replicas, by requested slots. Unset: fixed number."
    )
    replica_gpus: float | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs of each encoder and generator replica, or its share of one; profile split. Unset: 1 with provider=cuda, else 0.",
    )
    lean: bool = Field(
        False, description="Without HAProxy: the replica's own server accepts connections, which saves a few MiB of memory and a hop."
    )
    drain_timeout_s: float = Field(30.0, ge=0, le=3600, description="Seconds that SIGTERM waits for accepted requests to finish.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged: debug, info, warning or error."
    )
    otlp_endpoint: AnyHttpUrl | None = Field(
        None, description="Address for traces over OTLP/HTTP, such as http://collector:4318; needs attnserve[trace]. Unset: no traces."
    )
    access_log: bool = Field(False, description="Log every request, not only failed ones.")

    @field_validator("bundles", "default_model", "api_keys", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """`a,b` or `["a", "b"]` of an environment variable or of --set, beside the lists of YAML and flags."""
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            try:
                return json.loads(value)
            except ValueError:
                raise ValueError('it begins like a JSON list but is not one: write ["a", "b"], or a,b') from None
        return [part.strip() for part in value.split(",") if part.strip()]

    @field_validator("cors_origins", mode="after")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """As browsers send them: in lower case, without a slash at the end."""
        origins = tuple(origin.strip().rstrip("/").lower() for origin in value)
        if bad := [origin for origin in origins if not _ORIGIN.fullmatch(origin)]:
            raise ValueError(f"{bad[0]!r} is not an origin: write scheme://host or scheme://host:port, without a path, or *")
        return origins

    @field_validator("bundles")
    @classmethod
    def _absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        try:
            return tuple(path.expanduser().resolve() for path in value)  # a replica runs in a directory of its own
        except (OSError, RuntimeError) as error:  # a link to itself, a name too long, a user that is not there
            raise ValueError(f"a bundle's path cannot be resolved: {error}") from None

    @field_validator("api_keys_file", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return value or None  # an empty variable names no file

    @field_validator("api_keys_file")
    @classmethod
    def _not_resolved(cls, value: Path | None) -> Path | None:
        return value and Path(os.path.abspath(value.expanduser()))  # noqa: PTH100  # links stay: where they lead changes

    @field_validator("max_gateways", "max_encoders", "max_generators")
    @classmethod
    def _not_below_the_fewest(cls, value: int | None, info: ValidationInfo) -> int | None:
        fewest = str(info.field_name).removeprefix("max_")
        if value is not None and value < info.data.get(fewest, 1):
            raise ValueError(f"it is less than {fewest}={info.data[fewest]}")
        return value

    @field_validator("api_keys")
    @classmethod
    def _long_enough(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(len(key.get_secret_value()) < 8 for key in value):
            raise ValueError("an API key needs at least 8 characters")
        return value

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_keys) or self.api_keys_file is not None


class _Sources(BaseSettings, Settings):
    """The same fields, filled from flags, then environment, then file."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = os.environ.get(CONFIG_VARIABLE)
        return (init_settings, env_settings, *([YamlConfigSettingsSource(settings_cls, file)] if file else []))


def load(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Settings of this process. `flags` holds only what was given on the command line. SettingsError on anything that is not right."""
    if config:
        os.environ[CONFIG_VARIABLE] = str(config)
    if (file := os.environ.get(CONFIG_VARIABLE)) and not Path(file).is_file():
        raise SettingsError(f"{file} does not exist: --config and {CONFIG_VARIABLE} name a YAML file")
    if file:
        _check_yaml(Path(file))
    _check_aliases()
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | {CONFIG_VARIABLE}
    if unknown := sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known):
        raise SettingsError(f"{unknown[0]} is not a setting. Settings: {', '.join(sorted(known))}")
    try:
        return Settings.model_validate(dict(_Sources(**flags)))
    except ValueError as error:
        raise SettingsError(_sentence(error)) from None  # what pydantic says of a bad key holds the key


def check_names(settings: Settings, names: Sequence[str]) -> None:
    """SettingsError where two bundles have one name, or an alias or default_model one that none has. `names`: of all bundles, in order."""
    first: dict[str, Path] = {}
    for bundle, name in zip(settings.bundles, names, strict=True):
        if name in first:
            raise SettingsError(f"{bundle} and {first[name]} are both called {name}: export one under another --name")
        first[name] = bundle
    for alias, name in settings.aliases.items():
        if name not in first:
            raise SettingsError(f"alias {alias} names model {name}, which is not served. Served: {', '.join(names)}")
    for name in settings.default_model:
        if settings.aliases.get(name, name) not in first:
            raise SettingsError(f"default_model names model {name}, which is not served. Served: {', '.join(names)}")


def _check_yaml(file: Path) -> None:
    try:
        content = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        raise SettingsError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise SettingsError(f"{file} is not a YAML mapping of settings to values")


def _check_aliases() -> None:
    """The one setting that is JSON in the environment, where lists are written with commas; pydantic-settings would not say so."""
    variable = f"{PREFIX}ALIASES"
    value = os.environ.get(variable, "{}")
    try:
        json.loads(value)
    except ValueError:
        raise SettingsError(f'{variable}={value!r} is not accepted: it must be JSON, such as {{"name": "model"}}') from None


def freeze(settings: Settings) -> str:
    """The settings as JSON for another process of this service, keys in the open: never for a log."""
    return json.dumps({**settings.model_dump(mode="json"), "api_keys": [key.get_secret_value() for key in settings.api_keys]})


# Settings that are read for each request, and so can change while the service runs.
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
    """Those settings, for Serve's `user_config`."""
    return settings.model_dump(mode="json", include=set(LIVE))


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """With other values of live settings. SettingsError for another setting or a bad value."""
    if unknown := sorted(set(changes) - set(LIVE)):
        raise SettingsError(f"{unknown[0]} cannot change while the service runs. What can: {', '.join(LIVE)}")
    try:
        return Settings.model_validate({**json.loads(freeze(settings)), **changes})
    except ValueError as error:
        raise SettingsError(_sentence(error)) from None


def _sentence(error: ValueError) -> str:
    details = getattr(error, "errors", None)
    if details is None:
        return str(error)
    first = details()[0]
    said = first["msg"].removeprefix("Value error, ")  # of our own validators, which pydantic puts this before
    name = ".".join(map(str, first["loc"])) or "settings"
    if first["type"] == "extra_forbidden":
        return f"{name} is not a setting. Settings: {', '.join(sorted(Settings.model_fields))}"
    if first["loc"][:1] == ("api_keys",):
        return f"api_keys is not accepted: {said}"
    return f"{name}={first['input']!r} is not accepted: {said}"
