"""`attnserve fetch`: download bundles from an object store, a web server or a volume into a folder.

The manifest lists each file of a bundle with size and sha256. No directory listing is needed, so a plain web server suffices. If the URL
ends in `#sha256:FINGERPRINT`, the manifest must have this fingerprint. Files are written to the folder
`.NAME.partial`, which is renamed to `NAME` once all files are verified. A later call skips complete files and continues partial files.
"""

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from export import contract
from export.contract import MANIFEST, BundleError, File, Manifest
from service.errors import AttnserveError

CLOUDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az", "abfs": "az", "abfss": "az"}
_SCHEMES = ("https", "http", *sorted(CLOUDS), "file")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_NAMED = re.compile(rf"({_FOLDER.pattern})=(.+)", re.DOTALL)
_PINNED = re.compile(r"sha256:([0-9a-f]{64})")
_CHUNK_BYTES = 2**20
_MANIFEST_TRIES = 2
_TRIES = 5  # consecutive failures without progress after which a file counts as failed
_PROGRESS_BYTES = 2**16  # a try with fewer received bytes counts as no progress, so that a slow server cannot cause endless tries
_CONTINUES = "The same command continues from there"
_SPARE_BYTES = 64 * 2**20  # disk space to leave free

Show = Callable[[str, int, int], None]  # (name of the bundle, bytes so far, bytes in total)


class FetchError(AttnserveError):
    """A bundle could not be fetched. The message names the bundle, the reason and the next step."""


class TransferBroken(Exception):
    """Raised when a transfer ended early and can be continued."""


class NoRanges(Exception):
    """Raised when the server can only send a file from its beginning."""


@dataclass(frozen=True)
class BundleRequest:
    """A bundle to fetch: its URL, the name of its folder, and the fingerprint if the URL has one."""

    url: str
    name: str
    fingerprint: str | None


@dataclass(frozen=True)
class Bounds:
    most_bytes: int = 20 * 2**30  # limit on a bundle's size
    timeout_s: float = 30.0  # longest allowed time without a received byte
    least_bytes_per_s: int = 1024  # lowest allowed average rate, measured over every `timeout_s` seconds
    redirect_to: tuple[str, ...] = ()  # other servers to which a web server may redirect, as https://HOST or http://HOST:PORT


@dataclass(frozen=True)
class Fetched:
    folder: Path
    manifest: Manifest
    received_bytes: int  # 0 if the bundle was already there
    seconds: float
    pinned: bool


def parse(text: str) -> BundleRequest:
    """Return the request that is written as [NAME=]URL[#sha256:FINGERPRINT]. Raises FetchError for any other text."""
    named = _NAMED.fullmatch(text)
    given, rest = (named[1], named[2]) if named else (None, text)
    shown = rest.partition("?")[0].partition("#")[0]  # the URL for messages, without its query, which may contain a secret signature
    try:
        parts = urlsplit(rest)
        port, scheme = parts.port, parts.scheme
    except ValueError as error:
        raise FetchError(f"{text!r} is not a URL: {error}") from None
    user_allowed = scheme in ("abfs", "abfss") and parts.password is None
    if (parts.username is not None or parts.password is not None) and not user_allowed:
        raise FetchError("a URL contains a user name or password, which logs would show: give credentials in environment variables")
    if parts.query:
        raise FetchError(f"{shown} has a query (?), which signs or names one file, but a bundle is a folder of several: leave it out")
    pinned = _PINNED.fullmatch(parts.fragment)
    url = rest.partition("#")[0].rstrip("/").removesuffix(f"/{MANIFEST}").rstrip("/")
    name = given or unquote(urlsplit(url).path).rpartition("/")[2]
    local = scheme in ("", "file")
    for wrong, problem in (
        (not local and scheme not in _SCHEMES, f"{scheme} is not known; known are {', '.join(_SCHEMES)} and paths"),
        (not local and not parts.hostname, f"the URL names no {'host' if scheme.startswith('http') else 'bucket'}"),
        (scheme in CLOUDS and port is not None, "the URL has a port: set AWS_ENDPOINT_URL to the address of your own object store"),
        ("#" in rest and not pinned, "after # comes sha256: and the 64 hex digits of the fingerprint (`attnserve inspect` shows them)"),
        (not _FOLDER.fullmatch(name), f"{name!r} is no name for a folder: give one as NAME={shown}"),
    ):
        if wrong:
            raise FetchError(f"{rest!r}: {problem}")
    return BundleRequest(url, name, pinned and pinned[1])


def fetch(urls: Sequence[str], to: Path, bounds: Bounds, show: Show, say: Callable[[str], None]) -> Iterator[Fetched]:
    """Fetch the bundles one after the other into the folder `to`, which is created. Raises FetchError at the first failure. Complete
    bundles stay in the folder, and partial files stay for the next call.
    """
    wanted = [parse(url) for url in urls]
    names = [each.name for each in wanted]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FetchError(f"two URLs are for {to / twice}: give one of them another name, as NAME=URL")
    to.mkdir(parents=True, exist_ok=True)
    for each in wanted:
        with _lock(to, each.name, say):
            yield _Download(each, to, bounds, show, say).run()


class _Download:
    """One bundle that is fetched into the folder `to`."""

    def __init__(self, wanted: BundleRequest, to: Path, bounds: Bounds, show: Show, say: Callable[[str], None]) -> None:
        self._wanted, self._bounds, self._show, self._say = wanted, bounds, show, say
        self._final, self._partial = to / wanted.name, to / f".{wanted.name}.partial"
        self._received_bytes = 0

    def run(self) -> Fetched:
        began, url, pinned, final = time.monotonic(), self._wanted.url, self._wanted.fingerprint, self._final
        if final.is_symlink() or (final.exists() and not (final / MANIFEST).is_file() and (not final.is_dir() or any(final.iterdir()))):
            raise FetchError(f"{final} exists and is not a bundle, so it is not replaced. Move it away, or choose another folder or NAME=")
        there = self._intact(pinned) if pinned else None
        if there is None:
            scheme, bounds = urlsplit(url).scheme, self._bounds
            source = WebServer(url, bounds) if scheme.startswith("http") else ObjectStore(url, bounds) if scheme in CLOUDS else Folder(url)
            manifest = self._manifest(source)
            if pinned and manifest.fingerprint != pinned:
                shutil.rmtree(self._partial)
                raise FetchError(
                    f"{url} has the fingerprint {manifest.fingerprint}, but {pinned} was requested: it is another bundle, or "
                    "it was changed. Nothing was fetched"
                )
            there = None if pinned else self._intact(manifest.fingerprint)
        if there is None:
            total, before = sum(file.size_bytes for file in manifest.files), 0
            self._check_room(total)
            for file in manifest.files:
                self._fetch_file(source, file, before, total)
                before += file.size_bytes
            self._complete(manifest)
        else:
            manifest = there
            shutil.rmtree(self._partial, ignore_errors=True)
        return Fetched(final, manifest, self._received_bytes, time.monotonic() - began, pinned is not None)

    def _intact(self, fingerprint: str) -> Manifest | None:
        """If the folder already has the bundle with this fingerprint, and all hashes match, return its manifest, else None."""
        try:
            found = contract.read_manifest(self._final)
            return contract.verify(self._final) if found.fingerprint == fingerprint else None
        except BundleError:
            return None

    def _manifest(self, source: "BundleSource") -> Manifest:
        """Read the manifest, write it into the partial folder, and return it. Files of another bundle are removed from this folder first.
        Raises FetchError if the manifest is invalid.
        """
        url, partial, path, reason = self._wanted.url, self._partial, self._partial / MANIFEST, ""
        for _ in range(_MANIFEST_TRIES):
            content = b""
            try:
                for chunk in source.read(MANIFEST, 0):
                    content += chunk
                    if len(content) > contract.MOST_JSON_BYTES:
                        raise FetchError(f"{url}/{MANIFEST} has more than {contract.MOST_JSON_BYTES} bytes, the limit for a manifest")
                break
            except TransferBroken as error:
                reason = str(error)
        else:
            raise FetchError(f"{url}/{MANIFEST} could not be read: {reason}")
        if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
            partial.unlink()
        if path.is_symlink() or (partial.exists() and (not path.is_file() or path.read_bytes() != content)):
            shutil.rmtree(partial)
        partial.mkdir(exist_ok=True)
        path.write_bytes(content)
        try:
            return contract.read_manifest(partial)
        except BundleError as error:
            shutil.rmtree(partial)
            raise FetchError(f"{url} is not a bundle: {_reason(error).replace(str(partial), url)}") from None

    def _check_room(self, total: int) -> None:
        url, to, most = self._wanted.url, self._final.parent, self._bounds.most_bytes
        if total > most:
            shutil.rmtree(self._partial)
            raise FetchError(f"{url} has {_size(total)}, and the most is {_size(most)}: allow more with --max-gib")
        there = sum(path.lstat().st_size for path in self._partial.iterdir())
        if (needed := total - there + _SPARE_BYTES) > (free := shutil.disk_usage(to).free):
            raise FetchError(f"{to} has {_size(free)} free, and {url} needs {_size(needed)}: make room or choose another folder")

    def _fetch_file(self, source: "BundleSource", file: File, before: int, total: int) -> None:
        """Fetch a file, and check its size and hash. A partial file is continued. If the hash of a continued file is wrong, the file is
        fetched again from its beginning. `before` is the size in bytes of all files before this one, and `total` the size of all files.
        """
        path = self._partial / file.name
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise FetchError(f"{path} is not a regular file: another process may write there. Remove {path.parent}")
        found = path.stat().st_size if path.exists() else 0
        if found > file.size_bytes:
            path.unlink()
            found = 0
        for _ in range(2 if found else 1):
            self._transfer(source, file, path, lambda have: self._show(self._wanted.name, before + have, total))
            if contract.sha256(path) == file.sha256:
                return
            path.unlink()
        raise FetchError(
            f"{self._wanted.url}/{file.name} is not the file that its manifest describes: its sha256 differs. It was changed or damaged "
            "there"
        )

    def _transfer(self, source: "BundleSource", file: File, path: Path, shown: Callable[[int], None]) -> None:
        """Append the missing bytes to a file. Raises FetchError after `_TRIES` consecutive failures without progress."""
        url, failures, furthest = f"{self._wanted.url}/{file.name}", 0, 0
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b") as out:
            have = out.seek(0, os.SEEK_END)
            while have < file.size_bytes:
                try:
                    for chunk in source.read(file.name, have):
                        if have + len(chunk) > file.size_bytes:
                            raise FetchError(f"{url} has more than the {file.size_bytes} bytes of its manifest")
                        out.write(chunk)
                        have += len(chunk)
                        self._received_bytes += len(chunk)
                        shown(have)
                    if have < file.size_bytes:
                        raise TransferBroken(f"it ended after {have} of {file.size_bytes} bytes")
                except NoRanges:
                    have = out.seek(0)
                    out.truncate()
                except TransferBroken as error:
                    failures = failures + 1 if have < furthest + _PROGRESS_BYTES else 1
                    furthest = max(furthest, have)
                    stopped = f"stopped at {have} of {file.size_bytes} bytes"
                    if failures >= _TRIES:
                        raise FetchError(f"{url} {stopped}, {_TRIES} times: {error}. {_CONTINUES}") from None
                    self._say(f"{self._wanted.name}/{file.name} {stopped} and is continued: {error}")
                    time.sleep(min(failures, 5) * 0.2)
            out.flush()
            os.fsync(out.fileno())

    def _complete(self, manifest: Manifest) -> None:
        """Remove files that the manifest does not name, sync the folder to disk, and rename it. The folder replaces an older bundle. A
        service that has opened the older bundle's files can still read them.
        """
        names = {file.name for file in manifest.files} | {MANIFEST}
        for stray in self._partial.iterdir():
            if stray.is_dir() and not stray.is_symlink():
                shutil.rmtree(stray)
            elif stray.name not in names:
                stray.unlink()
        folder = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        old = self._final.with_name(f".{self._final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self._final.exists():
            self._final.rename(old)
        self._partial.rename(self._final)
        shutil.rmtree(old, ignore_errors=True)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


@contextmanager
def _lock(to: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Let only one process at a time fetch the bundle `name`, because pods that start together may share the volume. The kernel releases
    the lock if this process ends.
    """
    path = to / f".{name}.lock"
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is fetching {to / name}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):  # the process before may have removed the file for which this one waited
            if os.path.samestat(os.fstat(file), path.lstat()):
                break
        os.close(file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


# Where bundles come from ------------------------------------------------------------------------------------------------------------------


class BundleSource(Protocol):
    def read(self, name: str, start: int) -> Iterator[bytes]:
        """Yield the bytes of a file from byte `start` on. Raises FetchError if another try cannot help, NoRanges if `start` is not 0 and
        the server cannot send a part of a file, and TransferBroken for all other failures.
        """


class Folder:
    """A source of bundles in a local folder, such as a volume that Kubernetes creates from an OCI image."""

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


class WebServer:
    """A web server. A redirect is followed only to the same server or to one that the caller has named. Otherwise a server could make this
    machine read addresses that only this machine reaches.
    """

    def __init__(self, url: str, bounds: Bounds) -> None:
        self._url, self._bounds = url, bounds
        self._opener = build_opener(_Redirects((url, *bounds.redirect_to)))

    def read(self, name: str, start: int) -> Iterator[bytes]:
        file = f"{self._url}/{name}"
        headers = {"user-agent": "attnserve"} | ({"range": f"bytes={start}-"} if start else {})
        request = Request(quote(file, safe=":/%[]@!$&'()*+,;=~"), headers=headers)
        try:
            with self._opener.open(request, timeout=self._bounds.timeout_s) as answer:
                if start and answer.status != 206:
                    raise NoRanges
                yield from _quick(iter(lambda: answer.read1(_CHUNK_BYTES), b""), file, self._bounds)
                if answer.length:
                    raise TransferBroken(f"the connection ended {answer.length} bytes too early")
        except (OSError, HTTPException) as error:
            if getattr(error, "code", None) == 404:
                raise FetchError(f"{file} does not exist: give the URL of the bundle's folder") from None
            raise TransferBroken(str(error) or type(error).__name__) from None


class _Redirects(HTTPRedirectHandler):
    def __init__(self, servers: Sequence[str]) -> None:
        self._servers = set(map(_server, servers))

    def redirect_request(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str) -> Request | None:
        if (to := _server(newurl)) not in self._servers:
            fp.close()
            raise FetchError(f"{req.full_url} redirects to {to}. If you trust that server, allow it with --redirect-to {to}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _server(url: str) -> str:
    return "://".join(urlsplit(url)[:2]).lower()


class ObjectStore:
    """An object store, read with obstore. Credentials come from the same environment variables as for the providers' own tools."""

    def __init__(self, url: str, bounds: Bounds) -> None:
        from obstore import store

        scheme = urlsplit(url).scheme
        patience = f"{max(round(bounds.timeout_s * 1000), 1)}ms"
        # The whole request has practically no time limit, because a file may be large. obstore ends a request if no bytes arrive, and
        # `read` ends it if they arrive too slowly.
        client: dict[str, Any] = {"connect_timeout": patience, "read_timeout": patience, "timeout": "7days"}
        retry: dict[str, Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=4 * bounds.timeout_s)}
        options: Any = {"client_options": client, "retry_config": retry}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        if CLOUDS[scheme] == "s3" and endpoint.startswith("http://"):
            client["allow_http"] = True
        if CLOUDS[scheme] == "gs" and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
            client["allow_http"] = True
            options["config"] = {"base_url": emulator if "://" in emulator else f"http://{emulator}", "skip_signature": True}
        self._url = url
        self._bounds = bounds
        try:
            self._store: Any = store.from_url(url, **options)
        except Exception as error:  # obstore raises many types, among them ValueError
            raise FetchError(f"{url} cannot be opened: {_sentence(error)}") from None

    def read(self, name: str, start: int) -> Iterator[bytes]:
        import obstore
        from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError

        options: Any = {"range": {"offset": start}} if start else None
        try:
            # Take chunks of any size as they arrive. With chunks of a fixed size the rate could only be measured after each complete chunk.
            chunks = obstore.get(self._store, name, options=options).stream(min_chunk_size=1)
            yield from _quick(map(bytes, chunks), f"{self._url}/{name}", self._bounds)
        except NotSupportedError as error:
            if not start:
                raise FetchError(f"{self._url}/{name} cannot be read: {_sentence(error)}") from None
            raise NoRanges from None
        except FileNotFoundError:
            raise FetchError(f"{self._url}/{name} does not exist: give the URL of the bundle's folder") from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise FetchError(f"{self._url}/{name}: the credentials of this environment give no access: {_sentence(error)}") from None
        except (BaseError, OSError) as error:
            raise TransferBroken(_sentence(error)) from None


def _quick(chunks: Iterable[bytes], file: str, bounds: Bounds) -> Iterator[bytes]:
    """Yield the chunks of a file. Raises FetchError if they arrive too slowly."""
    since, came = time.monotonic(), 0
    for chunk in chunks:
        yield chunk
        came += len(chunk)
        if (lasted_s := time.monotonic() - since) >= bounds.timeout_s:
            if came < bounds.least_bytes_per_s * lasted_s:
                slowly = f"{came} bytes in {lasted_s:.0f} s; the least is {bounds.least_bytes_per_s} bytes/s"
                raise FetchError(f"{file} arrives too slowly: {slowly}. {_CONTINUES}")
            since, came = time.monotonic(), 0


def _reason(error: BundleError) -> str:
    """Return an error message without its advice to export the bundle again, which only the bundle's author can follow."""
    return str(error).removesuffix(" Export the bundle again.")


def _sentence(error: Exception) -> str:
    """Return the first line of obstore's message. The other lines are a debug dump and the server's error page."""
    said = str(error).partition("\n")[0][:500].rstrip(" :,")
    # These addresses are the clouds' metadata services, which obstore asks for the machine's own credentials. Only a message about such a
    # failed request gets our advice appended.
    if "//169.254." not in said and "metadata.google" not in said:
        return said
    public = "AWS_SKIP_SIGNATURE=true or GOOGLE_SKIP_SIGNATURE=true reads a public bucket"
    return f"{said} (there are no credentials in the environment, and this machine has none; {public})"
