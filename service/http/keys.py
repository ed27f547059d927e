"""API keys from the settings and from a file, which is read again when it changes.

The file contains SHA-256 hashes, so a copy of the file reveals no key. A dictionary maps the hash of a key to its tenant, so a
lookup costs the same for any number of keys. The time of a lookup depends only on the hash, so a caller cannot guess a key byte
by byte from the response times. A fast hash is enough because `attnserve key` draws 256 random bits. It would not be enough for
passwords.

Kubernetes updates a mounted Secret by replacing a symbolic link, so the module checks the file behind the link for changes.
"""

import asyncio
import hashlib
import json
import logging
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from service.call import Call
from service.errors import Unauthorized
from service.http.tenants import Rate, Sharing, Tenant, TenantLimits
from service.settings import Settings, SettingsError
from service.telemetry.metrics import Metrics

log = logging.getLogger("attnserve.keys")

MOST_BYTES = 8 * 1024 * 1024  # limit on the file's size: about 40,000 keys; a Kubernetes Secret has at most 1 MiB
MOST_LABELLED = 100  # limit on the tenants that have separate metrics
OTHERS = "other"  # the label in metrics that all other tenants share
_CHECKED_EVERY_S = 1.0

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
Most = Annotated[int, Field(ge=1, le=10**12)]


class KeyEntry(BaseModel):
    """One key in the file. The limits apply to the tenant, so all keys of a tenant must have the same limits. None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    tenant: Name
    requests_per_second: Most | None = None
    requests_per_minute: Most | None = None
    tokens_per_second: Most | None = None
    tokens_per_minute: Most | None = None
    streams: Most | None = None

    @property
    def limits(self) -> TenantLimits:
        return TenantLimits(
            _rate(self.requests_per_second, self.requests_per_minute), _rate(self.tokens_per_second, self.tokens_per_minute), self.streams
        )


_ENTRIES = TypeAdapter(Annotated[list[KeyEntry], Field(fail_fast=True)])


def _rate(a_second: int | None, a_minute: int | None) -> Rate | None:
    if a_second is not None:
        return Rate(a_second, 1.0)
    return None if a_minute is None else Rate(a_minute, 60.0)


def read(path: Path) -> list[KeyEntry]:
    """Read a file of keys. Raises SettingsError with the position and the reason, but without any content of the file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SettingsError(f"{path} is not a file: api_keys_file names a JSON file of keys")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or type(error).__name__}: api_keys_file names a JSON file") from None
    if len(content) > MOST_BYTES:
        raise SettingsError(f"{path} has more than {MOST_BYTES} bytes, the limit for a file of keys")
    try:
        entries = _ENTRIES.validate_json(content)
    except ValidationError as error:
        raise SettingsError(f"{path}: {_sentence(error)}") from None
    _check(entries, path)
    return entries


def _check(entries: Iterable[KeyEntry], path: Path) -> None:
    """Raise SettingsError if an entry is invalid or conflicts with another one, such as two keys with the same name."""
    hashes: dict[str, KeyEntry] = {}
    names: set[tuple[str, str]] = set()
    limits: dict[str, KeyEntry] = {}
    for entry in entries:
        said = f"key {entry.name} of tenant {entry.tenant}"
        if entry.tenant == OTHERS:
            raise SettingsError(f"{path}: {said}: the name {OTHERS} is reserved for the metrics of further tenants: choose another")
        for what in ("requests", "tokens"):
            if None not in (getattr(entry, f"{what}_per_second"), getattr(entry, f"{what}_per_minute")):
                raise SettingsError(f"{path}: {said} has {what}_per_second and {what}_per_minute: give one of the two")
        if (other := hashes.setdefault(entry.sha256.lower(), entry)) is not entry:
            raise SettingsError(f"{path}: {said} has the sha256 of key {other.name} of tenant {other.tenant}: remove one of the two")
        if (entry.tenant, entry.name) in names:
            raise SettingsError(f"{path}: {said} is there twice: give each key of a tenant a name of its own")
        names.add((entry.tenant, entry.name))
        if (other := limits.setdefault(entry.tenant, entry)).limits != entry.limits:
            raise SettingsError(f"{path}: {said} has other limits than key {other.name}: limits are the tenant's, the same at all its keys")


def _sentence(error: ValidationError) -> str:
    """Describe the first error, without the value or the name of an unknown field, since either may be a misplaced key."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return f"not JSON: {first['msg']}"
    if not first["loc"]:
        return 'not a list of keys: write [{"name": "ci", "sha256": "..", "tenant": "acme"}]'
    where = f"entry {first['loc'][0]}, counted from 0"
    if first["type"] == "extra_forbidden":
        return f"{where}, has a field that is not known. Fields: {', '.join(KeyEntry.model_fields)}"
    return f"{where}{''.join(f', `{part}`' for part in first['loc'][1:])}: {first['msg']}"


def key_in(headers: Mapping[str, str]) -> str:
    """Return the API key in the headers of a request, or "" if there is none.

    Clients of Azure send `api-key`, those of Anthropic `x-api-key`. `Authorization: Bearer KEY` has precedence.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else "") or headers.get("api-key") or headers.get("x-api-key", "")


class Keys:
    """The API keys of one process. Use it on the event loop only."""

    def __init__(
        self, settings: Settings, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic, sharing: Sharing | None = None
    ) -> None:
        """Raises SettingsError if the file is unusable, so that the service does not start without its keys."""
        self._sharing = sharing
        self.needed = settings.needs_key
        self._file = settings.api_keys_file
        self._metrics = metrics
        self._clock = clock
        self._found: dict[bytes, tuple[Tenant, str]] = {}  # key hash -> (tenant, name of the key)
        self._tenants: dict[str, Tenant] = {}  # the tenants in the file, by name
        self._labelled: set[str] = set()
        self._own: dict[bytes, tuple[Tenant, str]] = {}
        for key in settings.api_keys:
            digest = hashlib.sha256(key.get_secret_value().encode()).digest()
            name = f"key:{digest.hex()[:16]}"
            tenant = Tenant(name, client=name, clock=clock, sharing=sharing)
            tenant.metrics = metrics.tenant(OTHERS)  # not labelled with `name`, which has a part of the hash, because /metrics is public
            self._own[digest] = tenant, name
        self._mark: object = None
        self._install(self._read() or [])

    def identify(self, key: str, call: Call) -> Tenant:
        """Set the key and tenant of `call`, and return the tenant. `key`: the result of `key_in`, "" if there is none.

        Raises Unauthorized if the key is missing or unknown.
        """
        found = self._found.get(hashlib.sha256(key.encode("latin-1")).digest()) if key else None
        if found is None:
            raise Unauthorized("the API key is not known" if key else "an API key is needed: send it as `Authorization: Bearer KEY`")
        call.tenant, call.key = found
        call.client = call.host = found[0].client
        return found[0]

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant with this name, or None if no key belongs to it."""
        return next((tenant for tenant, _ in self._found.values() if tenant.name == name), None)

    async def watch(self) -> None:
        """Read the file again after every change, forever. An invalid file is logged once, and the keys stay as they were."""
        while self._file is not None:
            await asyncio.sleep(_CHECKED_EVERY_S)
            try:
                entries = await asyncio.to_thread(self._read)
                if entries is not None:
                    self._install(entries)
                    log.info("api keys were read again", extra={"keys": len(entries), "tenants": len(self._tenants)})
            except SettingsError as error:
                log.error("api keys stay as they were", extra={"error": str(error)})
            except Exception as error:  # the text of the error is not logged, because it may contain a key
                log.error("api keys stay as they were", extra={"error": type(error).__name__})

    def _read(self) -> list[KeyEntry] | None:
        """Return the file's entries if the file has changed since the previous call, else None. Blocks the thread."""
        if self._file is None:
            return None
        mark = _mark(self._file)
        if mark == self._mark:
            return None
        self._mark = mark  # set before reading, to notice a change during the read
        return read(self._file)

    def _install(self, entries: list[KeyEntry]) -> None:
        """Replace the keys by these entries, from the next request on. Running requests continue even if their key was removed."""
        tenants: dict[str, Tenant] = {}
        found = dict(self._own)
        for entry in entries:
            tenant = tenants.get(entry.tenant)
            if tenant is None:
                tenant = self._tenants.get(entry.tenant) or Tenant(entry.tenant, clock=self._clock, sharing=self._sharing)
                tenants[entry.tenant] = tenant
                tenant.limit(entry.limits)
            found[bytes.fromhex(entry.sha256)] = tenant, entry.name
        # The first tenants of the file have separate metrics, so that all gateways label the same tenants.
        labelled = set(list(tenants)[:MOST_LABELLED])
        for name in self._labelled - labelled:
            self._metrics.forget_tenant(name)
        for name, tenant in tenants.items():
            tenant.metrics = self._metrics.tenant(name if name in labelled else OTHERS)
        self._found, self._tenants, self._labelled = found, tenants, labelled


def _mark(path: Path) -> object:
    """Return a value by which a later call can tell whether the file at the path has changed."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def make(name: str, tenant: str, limits: dict[str, int | None]) -> tuple[str, KeyEntry]:
    """Generate a random key, and return it with its entry for the file. Raises SettingsError for an invalid name or limit."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    fields: dict[str, Any] = {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **limits}
    try:
        entry = KeyEntry.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SettingsError(f"{first['loc'][0]}={first['input']!r} is not accepted: {first['msg']}") from None
    _check([entry], Path("the new key"))
    return key, entry


def add(entry: KeyEntry, path: Path) -> None:
    """Add the entry to the file of keys, or create the file. The change is atomic, because a new file replaces the old one."""
    entries = [*(read(path) if path.exists() else []), entry]
    _check(entries, path)
    lines = ",\n ".join(entry_json(each) for each in entries)
    target = path.resolve()
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:  # the file has mode 0600
        file.write(f"[{lines}]\n")
    if target.exists():
        Path(file.name).chmod(target.stat().st_mode)
    Path(file.name).replace(target)


def entry_json(entry: KeyEntry) -> str:
    """Return the entry as JSON, without the limits that are not set."""
    return json.dumps(entry.model_dump(exclude_none=True))
