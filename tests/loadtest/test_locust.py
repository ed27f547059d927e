"""The command `locust` itself with the files that are made for it: what users of Locust do, against the real service."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from loadtest.common.server import free_port
from loadtest.load.kinds import KINDS
from tests.service.fakes import PATIENCE_S, fake_app, fake_bundle, serve_in_thread
from tests.service.live import LiveService

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
LOCUST = [str(Path(sys.executable).with_name("locust"))]
LOCUSTFILE = str(ROOT / "loadtest" / "locustfile.py")
FOR_SECONDS = ["--headless", "--only-summary", "--run-time", "4s", "--stop-timeout", "20"]
T = TypeVar("T")
CLASSES = {"Embed", "EmbedBatch", "EmbedMixed", "Documents", "Rerank", "Completion", "Chat", "Hostile"}


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """The command, outside of the repository and without its PYTHONPATH, as on a machine that only has a checkout; ended at the end."""
    ours = ("PYTHONPATH", "LOCUST_", "LOADTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    to = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([*LOCUST, *arguments], cwd=folder, env=environment, text=True, **to)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)


def ran(*arguments: str, folder: Path) -> tuple[int, str]:
    """The status of the command and what it said."""
    with started(*arguments, folder=folder) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said


def counted(file: Path) -> dict[str, tuple[int, int]]:
    """Requests and failures by row of Locust's own figures at the end."""
    return {row["name"]: (row["num_requests"], row["num_failures"]) for row in json.loads(file.read_text())}


def spawned(said: str) -> dict[str, int]:
    """How many users of each class Locust said that it had spawned."""
    found = re.findall(r'"(\w+)": (\d+)', re.findall(r"All users spawned: (.*)", said)[-1])
    return {name: int(count) for name, count in found}


@pytest.fixture(scope="module")
def encoder_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_in_thread(fake_app(fake_bundle(tmp_path_factory.mktemp("locust") / "encoder", name="fake-encoder"))) as url:
        yield url


def test_headless(service: LiveService, tmp_path: Path) -> None:
    """`locust -f .. --host URL` and nothing else of ours: every kind of client asks and is answered."""
    status, said = ran(
        "-f",
        LOCUSTFILE,
        "--host",
        service.url,
        "--users",
        "25",
        "-r",
        "25",
        "--json-file",
        "run",
        "--csv",
        "run",
        *FOR_SECONDS,
        folder=tmp_path,
    )
    assert status == 0, said
    assert "Traceback" not in said
    users = spawned(said)
    assert set(users) == CLASSES
    assert sum(users.values()) == 25
    assert users["Embed"] == 12  # the shares of loadtest/load/kinds.py are the weights
    rows = counted(tmp_path / "run.json")
    assert KINDS.keys() <= rows.keys(), said
    assert sum(failed for _, failed in rows.values()) == 0, said
    assert {name.removesuffix(" (refused)") for name in rows} == KINDS.keys(), "what streams measure is not counted as requests"
    with (tmp_path / "run_measurements.csv").open() as file:
        measured = {(row["kind"], row["measurement"]): row for row in csv.DictReader(file)}
    assert {kind for kind, _ in measured} == {"completion", "chat"}
    assert int(measured["completion", "first token, ms"]["count"]) == rows["completion"][0]
    assert "first token, ms" in said


def test_the_web_ui(service: LiveService, tmp_path: Path) -> None:
    """Its start page has our options in its form, its swarm request starts users, and its stop request ends them."""
    port = free_port()
    page = f"http://127.0.0.1:{port}"
    with (
        started("-f", LOCUSTFILE, "--host", service.url, "--web-host", "127.0.0.1", "--web-port", str(port), folder=tmp_path) as locust,
        httpx.Client(base_url=page, timeout=PATIENCE_S, transport=httpx.HTTPTransport(retries=20)) as browser,
    ):
        start = until(lambda: answered(browser), f"{page} answers", locust)
        assert start.status_code == 200
        assert service.url in start.text
        assert '"max_tokens"' in start.text
        assert "api_key" not in start.text
        form = {"user_count": "4", "spawn_rate": "4", "host": service.url, "max_tokens": "8", "words": "5", "model": "", "seed": "0"}
        swarm = browser.post("/swarm", data=form)
        assert swarm.json()["success"] is True, swarm.text
        until(lambda: stats(browser)["total"] > 4, "requests are counted", locust)
        assert stats(browser)["failed"] == 0
        assert browser.post("/stop").json()["success"] is True
        until(lambda: browser.get("/stats/requests").json()["state"] == "stopped", "users have stopped", locust)


def test_tags_and_what_no_model_answers(encoder_url: str, tmp_path: Path) -> None:
    """Users that a tag leaves nothing to do, or that no model can answer, are not spawned in the place of the others."""
    asked = ["--host", encoder_url, "--users", "5", "-r", "5", "--json-file", "run", "--headless", "--only-summary", "--run-time", "2s"]
    status, said = ran("-f", LOCUSTFILE, *asked, "--tags", "rerank", "stream", folder=tmp_path)
    assert status == 0, said
    assert {name: count for name, count in spawned(said).items() if count} == {"Rerank": 5}
    assert "no model of" in said
    assert {name for name, (count, _) in counted(tmp_path / "run.json").items() if count} == {"rerank"}


@pytest.mark.parametrize(("users", "classes"), [(6, 6), (3, 3)])
def test_few_users_are_of_different_classes(encoder_url: str, tmp_path: Path, users: int, classes: int) -> None:
    """By their shares alone, four of six would be of the class Embed."""
    asked = ["--host", encoder_url, "--users", str(users), "-r", "6", "--headless", "--only-summary", "--run-time", f"{PATIENCE_S:.0f}s"]
    with started("-f", LOCUSTFILE, *asked, folder=tmp_path) as locust:
        assert locust.stdout is not None
        said = ""
        while "All users spawned" not in said:
            line = locust.stdout.readline()
            assert line, said
            said += line
    assert len([count for count in spawned(said).values() if count]) == classes
    assert ("3 users are too few for one of each of 6 classes: give --users 6" in said) == (users < 6)


def test_the_number_of_users_follows_a_shape(encoder_url: str, tmp_path: Path) -> None:
    shaped = ["-f", f"{LOCUSTFILE},{ROOT / 'loadtest' / 'shapes.py'}", "--load-shape", "spike"]
    status, said = ran(
        *shaped, "--host", encoder_url, "--users", "10", "--headless", "--only-summary", "--run-time", "15s", folder=tmp_path
    )
    assert status == 0, said
    numbers = [sum(int(count) for count in re.findall(r'": (\d+)', line)) for line in re.findall(r"All users spawned: (.*)", said)]
    assert [number for number, before in zip(numbers, [0, *numbers], strict=False) if number != before] == [5, 20, 5]


def test_a_service_with_a_key(tmp_path: Path) -> None:
    """Every request has the key that the options or LOADTEST_API_KEY hold; without it the run ends, and says what to set."""
    key = "a-key-0123456789"
    with serve_in_thread(fake_app(fake_bundle(tmp_path / "encoder", name="fake-encoder"), api_keys=(key,))) as url:
        asked = ["-f", LOCUSTFILE, "--host", url, "--users", "8", "-r", "8", "--headless", "--only-summary", "--run-time", "2s"]
        status, said = ran(*asked, "--json-file", "run", "--api-key", key, folder=tmp_path)
        assert (status, sum(failed for _, failed in counted(tmp_path / "run.json").values())) == (0, 0), said
        assert key not in said
        status, said = ran(*asked, "--run-time", "60s", folder=tmp_path)  # it ends long before
        assert status == 1
        assert "set LOADTEST_API_KEY" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models does not answer"),
        (["--host", "127.0.0.1:8000"], "the host '127.0.0.1:8000' must have the form"),
        (["--host", "URL", "Chat"], "no user is left to spawn"),
        (["--host", "URL", "--model", "no-such"], "none of no-such"),
        (["--host", "URL", "--max-tokens", "0"], "--max-tokens is 0"),
    ],
)
def test_what_cannot_run_ends_with_a_reason(encoder_url: str, tmp_path: Path, arguments: list[str], words: str) -> None:
    """At once and with status 1: no run time is given."""
    given = [encoder_url if each == "URL" else each for each in arguments]
    status, said = ran("-f", LOCUSTFILE, "--headless", "--only-summary", *given, folder=tmp_path)
    assert status == 1, said
    assert words in said
    assert "Traceback" not in said


def test_locust_conf() -> None:
    """In the repository `locust` alone knows its file; its web UI is of this machine alone."""
    status, said = ran("--list", folder=ROOT)
    assert status == 0, said
    assert set(said.split()) >= CLASSES
    settings = dict(line.split(" = ") for line in (ROOT / "locust.conf").read_text().splitlines() if " = " in line)
    assert settings["locustfile"] == "loadtest/locustfile.py"
    assert settings["web-host"] == settings["master-bind-host"] == "127.0.0.1"


def test_a_worker_needs_only_locust_and_the_checkout() -> None:
    """Nothing of the service's own dependencies is imported."""
    missing = ["pydantic", "numpy", "rich", "typer", "onnxruntime", "ray"]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing}))\nimport loadtest.locustfile"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def answered(browser: httpx.Client) -> httpx.Response | None:
    try:
        return browser.get("/")
    except httpx.TransportError:
        return None


def stats(browser: httpx.Client) -> dict[str, int]:
    rows = browser.get("/stats/requests").json()["stats"]
    (total,) = [row for row in rows if row["name"] == "Aggregated"] or [{"num_requests": 0, "num_failures": 0}]
    return {"total": total["num_requests"], "failed": total["num_failures"]}


def until(found: Callable[[], T | None], what: str, process: "subprocess.Popen[str]") -> T:
    """What `found` gives as soon as that is true."""
    end = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert process.poll() is None, f"locust ended before {what}"
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.1)
    return value
