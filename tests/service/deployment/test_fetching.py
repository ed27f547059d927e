"""`attnserve fetch` from real servers: what arrives is the bundle, and otherwise nothing appears and what was there stays."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote

import pytest
from typer.testing import CliRunner, Result

from export import contract
from loadtest.common.server import free_port
from service.cli import app
from service.deployment import fetching
from service.deployment.fetching import Bounds, Fetched, FetchError
from tests.service.fakes import PATIENCE_S

LARGEST = "model.onnx.data"


class Server:
    """Files of a folder over HTTP. `ranges`: whether a part can be asked for. `cut` sends so many bytes of the file `broken`, then hangs up
    or, with `stall`, keeps the connection open and sends nothing more; `times` such answers. `instead` has other contents for a path;
    `drips` is the end of a path whose file is sent a byte at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ranges = folder, True
        self.broken = LARGEST
        self.cut: int | None = None
        self.times, self.stall = 0, False
        self.drips = "no file"
        self.closed = Event()
        self.instead: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}  # path -> Location
        self.asked: list[tuple[str, str]] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, wanted = unquote(request.path).lstrip("/"), request.headers.get("range", "")
        self.asked.append((path, wanted))
        file = self.folder / path
        if path in self.redirects:
            request.send_response(302)
            request.send_header("location", self.redirects[path])
            request.send_header("content-length", "0")
            request.end_headers()
            return
        content = self.instead.get(path) or (file.read_bytes() if file.is_file() else None)
        if content is None:
            request.send_error(404)
            return
        start = int(found[1]) if self.ranges and (found := re.fullmatch(r"bytes=(\d+)-\d*", wanted)) else 0
        request.send_response(206 if start else 200)
        request.send_header("content-length", str(len(content) - start))
        request.send_header("last-modified", "Sun, 22 Nov 2026 12:00:00 GMT")
        request.send_header("etag", '"1"')
        if start:
            request.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        part = content[start:]
        if self.cut is not None and self.times and path.endswith(self.broken):
            self.times -= 1
            part = part[: self.cut]
        if path.endswith(self.drips):
            drip(part, request, self.closed)
            return
        request.wfile.write(part)
        if len(part) < len(content) - start:
            request.wfile.flush()
            if self.stall:
                self.closed.wait(PATIENCE_S)
            request.close_connection = True


def drip(content: bytes, request: BaseHTTPRequestHandler, closed: Event) -> None:
    request.close_connection = True
    with suppress(OSError):  # the client has had enough
        for byte in content:
            request.wfile.write(bytes([byte]))
            if closed.wait(0.05):
                return


@pytest.fixture
def server(decoder_bundle: Path, tmp_path: Path) -> Iterator[Server]:
    """With the bundle `tiny`, which is a copy."""
    (tmp_path / "served").mkdir()
    shutil.copytree(decoder_bundle, tmp_path / "served" / "tiny")
    made = Server(tmp_path / "served")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        Thread(target=listening.serve_forever, daemon=True).start()
        made.url = f"http://127.0.0.1:{listening.server_port}"
        yield made
        made.closed.set()
        listening.shutdown()


def fetched(url: str, to: Path, **bounds: Any) -> Fetched:
    said: list[str] = []
    (made,) = fetching.fetch([url], to, Bounds(**{"timeout_s": PATIENCE_S, **bounds}), lambda *_: None, said.append)
    return made


def command(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["fetch", *arguments], env=env)


def fingerprint(bundle: Path) -> str:
    return contract.verify(bundle).fingerprint


def left(to: Path) -> set[str]:
    return {path.name for path in to.iterdir()}


# HTTP -------------------------------------------------------------------------------------------------------------------------------------


def test_a_bundle_comes_by_http_once(server: Server, decoder_bundle: Path, tmp_path: Path) -> None:
    """As an init container has it: URLs in the environment. The second time nothing at all is asked for."""
    pinned = f"{server.url}/tiny#sha256:{fingerprint(decoder_bundle)}"
    first = command("--to", str(tmp_path / "models"), env={"BUNDLE_URLS": f"{pinned}\n other={server.url}/tiny/"})
    assert first.exit_code == 0, first.output
    assert fingerprint(tmp_path / "models" / "tiny") == fingerprint(tmp_path / "models" / "other") == fingerprint(decoder_bundle)
    assert left(tmp_path / "models") == {"tiny", "other"}
    asked = len(server.asked)
    assert command(pinned, "--to", str(tmp_path / "models")).exit_code == 0
    assert len(server.asked) == asked
    assert fetched(f"other={server.url}/tiny", tmp_path / "models").received_bytes == 0
    assert [path for path, _ in server.asked[asked:]] == ["tiny/manifest.json"]


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_a_transfer_that_breaks_goes_on(server: Server, decoder_bundle: Path, tmp_path: Path, ranges: bool) -> None:
    """From where it was where the server can do that, else from the beginning."""
    server.ranges, server.cut, server.times = ranges, 1000, 1
    made = fetched(f"{server.url}/tiny", tmp_path / "models")
    assert fingerprint(made.folder) == fingerprint(decoder_bundle)
    whole = sum(file.size_bytes for file in made.manifest.files)
    assert made.received_bytes == whole + (0 if ranges else 1000)
    again = [wanted for path, wanted in server.asked if path.endswith(LARGEST)][1:]
    assert again[0].startswith("bytes=1000-")
    assert (again[-1] == "") is not ranges


def test_a_manifest_that_breaks_is_asked_for_twice(server: Server, tmp_path: Path) -> None:
    server.broken, server.cut, server.times = contract.MANIFEST, 10, 1000
    with pytest.raises(FetchError, match=r"tiny/manifest.json could not be read: \w+"):
        fetched(f"{server.url}/tiny", tmp_path / "to")
    server.times, server.ranges = 1, False  # so that the client cannot continue by itself
    assert fetched(f"{server.url}/tiny", tmp_path / "to").folder == tmp_path / "to" / "tiny"


def test_a_command_that_was_killed_goes_on(server: Server, decoder_bundle: Path, tmp_path: Path) -> None:
    """With the files that it left, whole and half, none of them from another bundle."""
    server.cut, server.times = 1000, 1000
    with pytest.raises(FetchError, match=r"continues from there"):
        fetched(f"{server.url}/tiny", tmp_path / "models")
    assert left(tmp_path / "models") == {".tiny.partial"}
    there = sum(path.stat().st_size for path in (tmp_path / "models" / ".tiny.partial").iterdir() if path.name != contract.MANIFEST)
    server.times, server.asked = 0, []
    made = fetched(f"{server.url}/tiny", tmp_path / "models")
    assert there > 0
    assert made.received_bytes == sum(file.size_bytes for file in made.manifest.files) - there
    assert fingerprint(made.folder) == fingerprint(decoder_bundle)
    assert left(tmp_path / "models") == {"tiny"}


@pytest.mark.parametrize("name", [LARGEST, "manifest.json"])
def test_a_server_that_never_ends_is_left(server: Server, tmp_path: Path, name: str) -> None:
    """It is never silent for long."""
    server.drips = name
    with pytest.raises(FetchError, match=rf"{name} arrives too slowly: \d+ bytes in \d+ s; the least is 1024 bytes/s"):
        fetched(f"{server.url}/tiny", tmp_path / "models", timeout_s=1.0)


def test_a_bundle_takes_the_place_of_an_older_one(server: Server, decoder_bundle: Path, tmp_path: Path) -> None:
    """Also of one that was damaged; a file that is open stays readable."""
    old = tmp_path / "models" / "tiny"
    shutil.copytree(decoder_bundle, old)
    older = contract.read_manifest(old).model_copy(update={"created": "2020-01-01T00:00:00+00:00"})
    (old / contract.MANIFEST).write_text(contract.dump(older))
    with (old / contract.MANIFEST).open() as held:
        assert fetched(f"{server.url}/tiny", tmp_path / "models").received_bytes > 0
        assert held.read() == contract.dump(older)
    (tmp_path / "models" / "tiny" / LARGEST).write_bytes(b"damaged")
    assert fetched(f"{server.url}/tiny#sha256:{fingerprint(decoder_bundle)}", tmp_path / "models").received_bytes > 0
    assert fingerprint(tmp_path / "models" / "tiny") == fingerprint(decoder_bundle)
    assert left(tmp_path / "models") == {"tiny"}


# What must not appear ---------------------------------------------------------------------------------------------------------------------


def changed_manifest(bundle: Path, **changes: Any) -> bytes:
    """A manifest that agrees with itself and whose first file is said to be another."""
    manifest = contract.read_manifest(bundle)
    first, *rest = manifest.files
    return contract.dump(manifest.model_copy(update={"files": (first.model_copy(update=changes), *rest)})).encode()


def traversal(bundle: Path) -> bytes:
    return (bundle / contract.MANIFEST).read_bytes().replace(b'"name": "golden.json"', b'"name": "../golden.json"')


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (LARGEST, lambda bundle: bytes((bundle / LARGEST).stat().st_size), r"sha256 differs"),
        (LARGEST, lambda bundle: (bundle / LARGEST).read_bytes() + b"x", r"more than the \d+ bytes"),
        (LARGEST, lambda bundle: (bundle / LARGEST).read_bytes()[:-1], r"stopped at \d+ of \d+ bytes, 5 times"),
        (contract.MANIFEST, lambda bundle: b"<html>sign in</html>", r"is not a bundle"),
        (contract.MANIFEST, lambda bundle: b" " * (contract.MOST_JSON_BYTES + 1), r"the limit for a manifest"),
        (contract.MANIFEST, traversal, r"is not a bundle: .*files\.\d+\.name"),
        (contract.MANIFEST, lambda bundle: changed_manifest(bundle, size_bytes=2**50), r"allow more with --max-gib"),
        (contract.MANIFEST, lambda bundle: changed_manifest(bundle, name="absent"), r"absent does not exist|is not a bundle"),
    ],
    ids=["changed", "longer", "shorter", "a page", "endless", "traversal", "too large", "missing file"],
)
def test_what_is_not_the_bundle_does_not_appear(
    server: Server, decoder_bundle: Path, tmp_path: Path, path: str, content: Any, words: str
) -> None:
    """And the bundle that was there stays."""
    (tmp_path / "models").mkdir()
    shutil.copytree(decoder_bundle, tmp_path / "models" / "tiny")
    (tmp_path / "models" / "tiny" / LARGEST).write_bytes(b"an older one")
    server.instead[f"tiny/{path}"] = content(decoder_bundle)
    with pytest.raises(FetchError, match=words):
        fetched(f"{server.url}/tiny", tmp_path / "models")
    assert (tmp_path / "models" / "tiny" / LARGEST).read_bytes() == b"an older one"
    assert not (tmp_path / "golden.json").exists()


def test_another_bundle_than_the_pinned_one_is_not_fetched(server: Server, tmp_path: Path) -> None:
    ended = command(f"{server.url}/tiny#sha256:{'0' * 64}", "--to", str(tmp_path / "models"))
    assert isinstance(ended.exception, FetchError)
    assert f"{'0' * 64} was requested" in str(ended.exception)
    assert [path for path, _ in server.asked] == ["tiny/manifest.json"]
    assert left(tmp_path / "models") == set()


def test_what_is_there_and_no_bundle_is_not_replaced(server: Server, tmp_path: Path) -> None:
    """Neither a folder of other things, nor what a link leads to; nor is a link followed where files gather."""
    models, other = tmp_path / "models", tmp_path / "other"
    (models / "tiny").mkdir(parents=True)
    (models / "tiny" / "notes").write_text("mine")
    other.mkdir()
    with pytest.raises(FetchError, match="is not a bundle, so it is not replaced"):
        fetched(f"{server.url}/tiny", models)
    (models / "link").symlink_to(other)
    with pytest.raises(FetchError, match="is not a bundle, so it is not replaced"):
        fetched(f"link={server.url}/tiny", models)
    (models / ".free.partial").symlink_to(other)
    fetched(f"free={server.url}/tiny", models)
    assert list(other.iterdir()) == []
    (partial := models / ".last.partial").mkdir()
    shutil.copy(server.folder / "tiny" / contract.MANIFEST, partial)
    (partial / LARGEST).symlink_to(other / "elsewhere")
    with pytest.raises(FetchError, match="is not a regular file"):
        fetched(f"last={server.url}/tiny", models)
    assert list(other.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://host/model?X-Amz-Signature=secret", "has a query"),
        ("https://user:secret@host/model", "credentials in environment variables"),
        ("ftp://host/model", "ftp is not known"),
        ("https://host/model#9f86d0", "after # comes sha256:"),
        ("https://host/", "is no name for a folder"),
        ("https://host/..", "is no name for a folder"),
        ("https://host/%2e%2e", "is no name for a folder"),
        ("s3:///model", "names no bucket"),
        ("https://[::1/model", "is not a URL"),
    ],
)
def test_a_url_that_will_not_do_is_refused_with_a_reason(url: str, words: str) -> None:
    with pytest.raises(FetchError, match=re.escape(words)) as refused:
        fetching.parse(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("path", [contract.MANIFEST, LARGEST])
def test_a_redirect_to_another_server_is_followed_only_if_the_command_allows_that_server(
    server: Server, decoder_bundle: Path, tmp_path: Path, path: str
) -> None:
    """Such as the metadata service of a cloud, which only this machine reaches."""
    other = server.url.replace("127.0.0.1", "localhost")
    server.redirects[f"tiny/{path}"] = f"{other}/moved/{path}"
    server.instead[f"moved/{path}"] = (decoder_bundle / path).read_bytes()
    refused = command(f"{server.url}/tiny", "--to", str(tmp_path / "models"))
    assert f"tiny/{path} redirects to {other}. If you trust that server, allow it with --redirect-to {other}" in str(refused.exception)
    assert f"moved/{path}" not in [asked for asked, _ in server.asked]
    allowed = command(f"{server.url}/tiny", "--to", str(tmp_path / "models"), "--redirect-to", other)
    assert allowed.exit_code == 0, allowed.output
    assert fingerprint(tmp_path / "models" / "tiny") == fingerprint(decoder_bundle)


def test_two_bundles_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="two URLs are for"):
        list(fetching.fetch(["s3://a/mini", "gs://b/mini"], tmp_path, Bounds(), lambda *_: None, lambda _: None))


def test_one_process_at_a_time(server: Server, tmp_path: Path) -> None:
    """Pods that share a volume: the second waits, and then finds the bundle there."""
    models = tmp_path / "models"
    said: list[str] = []
    fetched(f"{server.url}/tiny", models)
    second = fetching.fetch([f"{server.url}/tiny"], models, Bounds(), lambda *_: None, said.append)
    results: list[Fetched] = []
    thread = Thread(target=lambda: results.extend(second))
    with fetching._lock(models, "tiny", said.append):
        thread.start()
        end = time.monotonic() + PATIENCE_S
        while not said and time.monotonic() < end:
            time.sleep(0.01)
        assert said == [f"another process is fetching {models / 'tiny'}: waiting for it"]
        assert not results
    thread.join(PATIENCE_S)
    assert [each.received_bytes for each in results] == [0]
    assert left(models) == {"tiny"}, "no lock stays"


def test_without_obstore_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    ended = command("s3://bucket/mini", "--to", str(tmp_path))
    assert "pip install 'attnserve[fetch]'" in str(ended.exception)


# Volumes and clouds -----------------------------------------------------------------------------------------------------------------------


def test_a_bundle_comes_from_a_mounted_volume(decoder_bundle: Path, tmp_path: Path) -> None:
    """By path or file://; a link out of its folder is not followed."""
    for url in (str(decoder_bundle), decoder_bundle.as_uri()):
        made = fetched(f"mini={url}#sha256:{fingerprint(decoder_bundle)}", tmp_path / str(len(url)))
        assert fingerprint(made.folder) == fingerprint(decoder_bundle)
    shutil.copytree(decoder_bundle, tmp_path / "volume")
    (tmp_path / "volume" / LARGEST).unlink()
    (tmp_path / "volume" / LARGEST).symlink_to(decoder_bundle / LARGEST)
    with pytest.raises(FetchError, match="link to a place outside the bundle"):
        fetched(str(tmp_path / "volume"), tmp_path / "models")
    with pytest.raises(FetchError, match=r"manifest\.json is missing\.$"):
        fetched(str(tmp_path / "nowhere"), tmp_path / "models")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that speaks S3."""
    port, log = free_port(), tmp_path_factory.mktemp("s3") / "log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output)
        try:
            end = time.monotonic() + PATIENCE_S
            while True:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@contextmanager
def aws(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> Iterator[None]:
    """The environment of a pod with keys, and with an S3 server of its own."""
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield


def test_a_bundle_comes_from_s3(s3: str, decoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.store import S3Store

    store = {"endpoint": s3, "access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    client = {"allow_http": True}
    subprocess.run(
        [sys.executable, "-c", MAKE_BUCKET, s3],
        check=True,
        env={**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"},
    )
    bucket = S3Store("models", **store, client_options=client)  # type: ignore[arg-type]
    for file in decoder_bundle.iterdir():
        obstore.put(bucket, f"team/tiny/{file.name}", file)
    with aws(monkeypatch, s3):
        url = f"s3://models/team/tiny#sha256:{fingerprint(decoder_bundle)}"
        ended = command(url, "--to", str(tmp_path / "models"))
        assert ended.exit_code == 0, (ended.output, ended.exception)
        assert fingerprint(tmp_path / "models" / "tiny") == fingerprint(decoder_bundle)
        (tmp_path / "half" / ".tiny.partial").mkdir(parents=True)
        for name in (contract.MANIFEST, LARGEST):
            shutil.copy(decoder_bundle / name, tmp_path / "half" / ".tiny.partial")
        os.truncate(tmp_path / "half" / ".tiny.partial" / LARGEST, 1000)
        half = fetched(url, tmp_path / "half")
        assert half.received_bytes == sum(file.size_bytes for file in half.manifest.files) - 1000
        for missing in ("s3://models/none", "s3://no-such-bucket/tiny"):
            with pytest.raises(FetchError, match=r"manifest\.json does not exist"):
                fetched(missing, tmp_path / "models")


MAKE_BUCKET = "import boto3, sys; boto3.client('s3', endpoint_url=sys.argv[1]).create_bucket(Bucket='models')"


def test_a_bundle_comes_from_google_cloud_storage(
    server: Server, decoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client, with the variable that names another server to all clients of that store."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    (server.folder / "bucket").mkdir()
    shutil.move(server.folder / "tiny", server.folder / "bucket" / "tiny")
    made = fetched("gs://bucket/tiny", tmp_path / "models")
    assert fingerprint(made.folder) == fingerprint(decoder_bundle)
