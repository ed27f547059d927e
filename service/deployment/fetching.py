"""`attnserve fetch`: download bundles from an object store, a web server or a volume into a folder.

The manifest names every file of a bundle with size and sha256. No directory is listed, so a plain web server will do. If the URL ends in
`#sha256:FINGERPRINT`, the manifest must have this fingerprint. Files are written to `.NAME.partial` beside the bundle, and the folder is
renamed when all of them are right. A later call skips whole files and continues partial ones.
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from export import contract
from export.contract import MANIFEST, BundleError, File, Manifest
from service.errors import AttnserveError

CLOUDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_NAMED = re.compile(rf"({_FOLDER.pattern})=(.+)", re.DOTALL)
_PINNED = re.compile(r"sha256:([0-9a-f]{64})")
_CHUNK_BYTES = 2**20
_MANIFEST_TRIES = 2
_TRIES = 5  # of a file, in a row without progress
_PROGRESS_BYTES = 2**16  # of a try: fewer are none, or a server could send a byte a try, for ever
_SPARE_BYTES = 64 * 2**20  # of the disk, left free

Show = Callable[[str, int, int], None]  # name of the bundle, bytes so far, bytes in all


class FetchError(AttnserveError):
    """A bundle could not be fetched. The message says which, why, and the next step."""


class Broken(Exception):
    """A transfer ended early and can be continued."""


class NoRanges(Exception):
    """The server cannot send a file from an offset."""


@dataclass(frozen=True)
class Wanted:
    """A bundle to fetch: its URL, the name of its folder, and the fingerprint if the URL has one."""

    url: str
    name: str
    fingerprint: str | None


@dataclass(frozen=True)
class Bounds:
    most_bytes: int = 20 * 2**30  # of one bundle
    timeout_s: float = 30.0  # without a byte
    least_bytes_per_s: int = 1024  # on average over each `timeout_s`


@dataclass(frozen=True)
class Fetched:
    folder: Path
    manifest: Manifest
    received_bytes: int  # 0: the bundle was already there
    seconds: float
    pinned: bool


def parse(text: str) -> Wanted:
    """Parse [NAME=]URL[#sha256:FINGERPRINT]. Raises FetchError."""
    named = _NAMED.fullmatch(text)
    given, rest = (named[1], named[2]) if named else (None, text)
    try:
        parts = urlsplit(rest)
        port = parts.port
    except ValueError as error:
        raise FetchError(f"{text!r} is not a URL: {error}") from None
    if parts.password is not None or (parts.username is not None and parts.scheme not in ("abfs", "abfss")):
        raise FetchError("a URL holds a user name or password, which others would see: give credentials by the environment")
    if parts.query:
        raise FetchError(
            f"{_without_query(rest)} has a query (?), which signs or names one file, and a bundle is a folder of several: leave it out"
        )
    if parts.scheme not in ("", "file", "http", "https", *CLOUDS):
        raise FetchError(f"{rest!r}: {parts.scheme} is not known; there are: https, http, {', '.join(sorted(CLOUDS))}, file and paths")
    if parts.scheme not in ("", "file") and not parts.hostname:
        raise FetchError(f"{rest!r} names no {'host' if parts.scheme.startswith('http') else 'bucket'}")
    if parts.scheme in CLOUDS and port is not None:
        raise FetchError(f"{rest!r} has a port: the address of an object store of your own belongs in AWS_ENDPOINT_URL")
    fingerprint = None
    if "#" in rest:
        if not (pinned := _PINNED.fullmatch(parts.fragment)):
            raise FetchError(f"{rest!r}: after # comes sha256: and the 64 hex digits of the fingerprint (`attnserve inspect` shows them)")
        fingerprint = pinned[1]
    url = rest.partition("#")[0].rstrip("/").removesuffix(f"/{MANIFEST}").rstrip("/")
    name = given or unquote(urlsplit(url).path).rpartition("/")[2]
    if not _FOLDER.fullmatch(name):
        raise FetchError(f"{rest!r} ends in {name!r}, which is no name for a folder: give one as NAME={_without_query(rest)}")
    return Wanted(url, name, fingerprint)


def _without_query(url: str) -> str:
    """The URL for a message: its query may be a signature."""
    return url.partition("?")[0].partition("#")[0]


def fetch(urls: Sequence[str], to: Path, bounds: Bounds, show: Show, say: Callable[[str], None]) -> Iterator[Fetched]:
    """Fetch the bundles one after the other into the folder `to`, which is created. Raises FetchError at the first that fails; the bundles
    before it stay, and so do its partial files, for the next call."""
    wanted = [parse(url) for url in urls]
    if twice := next((each.name for at, each in enumerate(wanted) if each.name in [one.name for one in wanted[:at]]), None):
        raise FetchError(f"two URLs are for {to / twice}: give one of them another name, as NAME=URL")
    to.mkdir(parents=True, exist_ok=True)
    for each in wanted:
        with _lock(to, each.name, say):
            yield _fetch_one(each, to, bounds, show, say)


def _fetch_one(wanted: Wanted, to: Path, bounds: Bounds, show: Show, say: Callable[[str], None]) -> Fetched:
    began, final, partial = time.monotonic(), to / wanted.name, to / f".{wanted.name}.partial"
    pinned = wanted.fingerprint is not None
    if final.is_symlink() or (final.exists() and not _replaceable(final)):
        raise FetchError(f"{final} is there and is no bundle: it is not replaced. Move it away, or choose another folder or NAME=")
    if wanted.fingerprint and (there := _intact(final, wanted.fingerprint)):
        shutil.rmtree(partial, ignore_errors=True)
        return Fetched(final, there, 0, time.monotonic() - began, pinned)
    source = _source(wanted.url, bounds)
    text = _read_manifest(source, wanted)
    manifest = _checked_manifest(text, wanted, partial)
    if wanted.fingerprint and manifest.fingerprint != wanted.fingerprint:
        shutil.rmtree(partial)
        raise FetchError(
            f"{wanted.url} has the fingerprint {manifest.fingerprint}, and {wanted.fingerprint} was asked for: it is another bundle, or it "
            "was changed. Nothing was fetched"
        )
    if not wanted.fingerprint and (there := _intact(final, manifest.fingerprint)):
        shutil.rmtree(partial)
        return Fetched(final, there, 0, time.monotonic() - began, pinned)
    _check_room(manifest, wanted, to, partial, bounds)
    received, total = 0, sum(file.size_bytes for file in manifest.files)
    done = 0
    for file in manifest.files:

        def shown(there_bytes: int, before: int = done) -> None:
            show(wanted.name, before + there_bytes, total)

        received += _fetch_file(source, file, partial / file.name, wanted, shown, say)
        done += file.size_bytes
    _complete(partial, manifest)
    _replace(partial, final)
    return Fetched(final, manifest, received, time.monotonic() - began, pinned)


# Before the transfer ----------------------------------------------------------------------------------------------------------------------


def _replaceable(final: Path) -> bool:
    return final.is_dir() and ((final / MANIFEST).is_file() or not any(final.iterdir()))


def _intact(final: Path, fingerprint: str) -> Manifest | None:
    """The manifest of the bundle in `final` if it has this fingerprint and all its hashes are right, else None."""
    if not (final / MANIFEST).exists():
        return None
    try:
        found = contract.read_manifest(final)
        return contract.verify(final) if found.fingerprint == fingerprint else None
    except BundleError:
        return None


def _read_manifest(source: "Source", wanted: Wanted) -> bytes:
    reason = ""
    for _ in range(_MANIFEST_TRIES):
        content = b""
        try:
            for chunk in source.read(MANIFEST, 0):
                content += chunk
                if len(content) > contract.MOST_JSON_BYTES:
                    raise FetchError(f"{wanted.url}/{MANIFEST} has more than {contract.MOST_JSON_BYTES} bytes, the most of a manifest")
            return content
        except Broken as error:
            reason = str(error)
    raise FetchError(f"{wanted.url}/{MANIFEST} could not be read: {reason}")


def _checked_manifest(text: bytes, wanted: Wanted, partial: Path) -> Manifest:
    """Validate the manifest and write it into `partial`, from which files of any other bundle are removed first."""
    path = partial / MANIFEST
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        partial.unlink()
    if path.is_symlink() or (partial.exists() and (not path.is_file() or path.read_bytes() != text)):
        shutil.rmtree(partial)
    partial.mkdir(exist_ok=True)
    path.write_bytes(text)
    try:
        return contract.read_manifest(partial)
    except BundleError as error:
        shutil.rmtree(partial)
        raise FetchError(f"{wanted.url} is no bundle: {_reason(error).replace(str(partial), wanted.url)}") from None


def _check_room(manifest: Manifest, wanted: Wanted, to: Path, partial: Path, bounds: Bounds) -> None:
    total = sum(file.size_bytes for file in manifest.files)
    if total > bounds.most_bytes:
        shutil.rmtree(partial)
        raise FetchError(f"{wanted.url} has {_size(total)}, and {_size(bounds.most_bytes)} are the most: --max-gib allows more")
    there = sum(path.lstat().st_size for path in partial.iterdir())
    if (needed := total - there + _SPARE_BYTES) > (free := shutil.disk_usage(to).free):
        raise FetchError(f"{to} has {_size(free)} free, and {wanted.url} needs {_size(needed)}: make room or choose another folder")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


# A file -----------------------------------------------------------------------------------------------------------------------------------


def _fetch_file(source: "Source", file: File, path: Path, wanted: Wanted, shown: Callable[[int], None], say: Callable[[str], None]) -> int:
    """Fetch a file and check size and hash; returns the bytes received. A partial file is continued. If the hash is then wrong, the file is
    fetched once more from the beginning."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise FetchError(f"{path} is no regular file: another process writes there. Remove {path.parent}")
    found = path.stat().st_size if path.exists() else 0
    if found > file.size_bytes:
        path.unlink()
        found = 0
    received = 0
    for _ in range(2 if found else 1):
        received += _transfer(source, file, path, wanted, shown, say)
        if _sha256(path) == file.sha256:
            return received
        path.unlink()
    raise FetchError(f"{wanted.url}/{file.name} is not what its manifest says: its sha256 differs. It was changed or damaged where it is")


def _transfer(source: "Source", file: File, path: Path, wanted: Wanted, shown: Callable[[int], None], say: Callable[[str], None]) -> int:
    """Append the rest of a file; returns the bytes received. Raises FetchError after `_TRIES` failures in a row without progress."""
    failures, furthest, received = 0, 0, 0
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b") as out:
        have = out.seek(0, os.SEEK_END)
        while have < file.size_bytes:
            try:
                for chunk in source.read(file.name, have):
                    if have + len(chunk) > file.size_bytes:
                        raise FetchError(f"{wanted.url}/{file.name} has more than the {file.size_bytes} bytes that its manifest says")
                    out.write(chunk)
                    have, received = have + len(chunk), received + len(chunk)
                    shown(have)
                if have < file.size_bytes:
                    raise Broken(f"it ended after {have} of {file.size_bytes} bytes")
            except NoRanges:
                have = out.seek(0)
                out.truncate()
            except Broken as error:
                failures = failures + 1 if have < furthest + _PROGRESS_BYTES else 1
                furthest = max(furthest, have)
                if failures >= _TRIES:
                    raise FetchError(
                        f"{wanted.url}/{file.name} stopped at {have} of {file.size_bytes} bytes, {_TRIES} times: {error}. The same command "
                        "goes on from there"
                    ) from None
                say(f"{wanted.name}/{file.name} is continued at {have} of {file.size_bytes} bytes: {error}")
                time.sleep(min(failures, 5) * 0.2)
        out.flush()
        os.fsync(out.fileno())
    return received


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# At the end -------------------------------------------------------------------------------------------------------------------------------


def _complete(partial: Path, manifest: Manifest) -> None:
    """Remove files that the manifest does not name, and sync the folder, so that it survives a power cut."""
    names = {file.name for file in manifest.files} | {MANIFEST}
    for stray in set(os.listdir(partial)) - names:
        path = partial / stray
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _replace(partial: Path, final: Path) -> None:
    """Rename the folder, replacing an older bundle. A service that has the older one open keeps its files."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _lock(to: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Lock a bundle, since pods that start together may share the volume. The lock ends with its process."""
    file = os.open(to / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is fetching {to / name}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


# Where bundles come from ------------------------------------------------------------------------------------------------------------------


class Source(Protocol):
    def read(self, name: str, start: int) -> Iterator[bytes]:
        """A file of the bundle from byte `start` on. Raises FetchError if another try cannot help, else Broken; NoRanges if `start` is not
        0 and the server cannot do that."""


def _source(url: str, bounds: Bounds) -> Source:
    scheme = urlsplit(url).scheme
    return Folder(url) if scheme in ("", "file") else Store(url, scheme, bounds)


class Folder:
    """A folder of this machine, such as a volume that Kubernetes makes of an OCI image."""

    def __init__(self, url: str) -> None:
        self._folder = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else Path(url)

    def read(self, name: str, start: int) -> Iterator[bytes]:
        try:
            with contract.regular(self._folder, name).open("rb") as file:
                file.seek(start)
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except BundleError as error:
            raise FetchError(f"{self._folder} cannot be fetched: {_reason(error)}") from None


class Store:
    """An object store or a web server, by obstore. Credentials come from the environment variables that the clouds' own tools read."""

    def __init__(self, url: str, scheme: str, bounds: Bounds) -> None:
        from obstore import store

        patience = f"{max(round(bounds.timeout_s * 1000), 1)}ms"
        # A request may last as long as its file needs; obstore ends it after silence, and `read` if it is too slow.
        client: dict[str, Any] = {"connect_timeout": patience, "read_timeout": patience, "timeout": "7days"}
        retry: dict[str, Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=4 * bounds.timeout_s)}
        options: Any = {"client_options": client, "retry_config": retry}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        if scheme == "http" or (CLOUDS.get(scheme) == "s3" and endpoint.startswith("http://")):
            client["allow_http"] = True
        if CLOUDS.get(scheme) == "gs" and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
            client["allow_http"] = True
            options["config"] = {"base_url": emulator if "://" in emulator else f"http://{emulator}", "skip_signature": True}
        self._url = url
        self._bounds = bounds
        try:
            self._store: Any = store.HTTPStore.from_url(url, **options) if scheme in ("http", "https") else store.from_url(url, **options)
        except Exception as error:  # obstore raises many kinds, among them ValueError
            raise FetchError(f"{url} cannot be asked: {_sentence(error)}") from None

    def read(self, name: str, start: int) -> Iterator[bytes]:
        import obstore
        from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError

        options: Any = {"range": {"offset": start}} if start else None
        since, came = time.monotonic(), 0
        try:
            # Chunks as they arrive: one of a fixed size would hide for how long its bytes took.
            for chunk in obstore.get(self._store, name, options=options).stream(min_chunk_size=1):
                yield bytes(chunk)
                came += len(chunk)
                if (lasted_s := time.monotonic() - since) >= self._bounds.timeout_s:
                    if came < self._bounds.least_bytes_per_s * lasted_s:
                        raise FetchError(
                            f"{self._url}/{name} comes too slowly: {came} bytes in {lasted_s:.0f} s, and {self._bounds.least_bytes_per_s} "
                            "a second are the fewest. The same command goes on from there"
                        )
                    since, came = time.monotonic(), 0
        except NotSupportedError as error:
            if not start:
                raise FetchError(f"{self._url}/{name} cannot be read: {_sentence(error)}") from None
            raise NoRanges from None
        except FileNotFoundError:
            raise FetchError(
                f"{self._url}/{name} is not there: a bundle's URL is that of the folder with {MANIFEST} and its files"
            ) from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise FetchError(f"{self._url}/{name} may not be read with the credentials of this environment: {_sentence(error)}") from None
        except (BaseError, OSError) as error:
            raise Broken(_sentence(error)) from None


def _reason(error: BundleError) -> str:
    """What is wrong with a bundle, without the advice to export it again, which is for its author."""
    return str(error).removesuffix(" Export the bundle again.")


def _sentence(error: Exception) -> str:
    """The first line of obstore's message; the others are a debug dump and the server's page."""
    said = str(error).partition("\n")[0][:500].rstrip(" :,")
    asked_machine = "//169.254." in said or "metadata.google" in said
    if not asked_machine:
        return said
    public = "AWS_SKIP_SIGNATURE=true or GOOGLE_SKIP_SIGNATURE=true reads a public bucket"
    return f"{said} (there are no credentials in the environment, and this machine has none; {public})"
