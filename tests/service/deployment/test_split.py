"""Profile split as it is run: real replicas behind Ray's handles, clients that know nothing of it, and replicas that die."""

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from service.settings import LIVE
from tests.encoder_decoders import endless_encoder_decoder_bundle
from tests.service.fakes import PATIENCE_S, wait_until
from tests.service.live import LiveService, live

pytestmark = pytest.mark.live
LONGEST_S = 60  # a request that waits for a hanging replica waits for its deadline, 300 s
ENDLESS: list[dict[str, Any]] = [{"model": "tiny-decoder", "extra_body": {"ignore_eos": True}}, {"model": "endless-writer"}]


@pytest.fixture(scope="module")
def split(
    encoder_bundle: Path, decoder_bundle: Path, encoder_decoder_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveService]:
    """Two encoders and two generators, for all tests of this file."""
    bundles = [
        encoder_bundle,
        decoder_bundle,
        encoder_decoder_bundle,
        endless_encoder_decoder_bundle(tmp_path_factory.mktemp("split") / "endless-writer"),
    ]
    limits = ("--set", "max_queue_tokens=4000", "--set", "max_wait_s=60")  # on a busy machine a queue may be long
    with live(bundles, "--profile", "split", "--encoders", "2", "--generators", "2", *limits) as made:
        yield made


@pytest.fixture
def client(split: LiveService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{split.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def replicas(service: LiveService, pool: str) -> list[psutil.Process]:
    """The processes of its replicas that run or are stopped."""
    found = []
    for process in service.family():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if f"ServeReplica:attnserve:{pool}" in " ".join(process.cmdline()[:1]):
                found.append(process)
    return found


def until_there_are(service: LiveService, pool: str, number: int) -> None:
    """A dead replica has been replaced, and the gateway can ask all of both pools: a process is there long before it has loaded."""

    def known() -> int:
        output = service.output
        return output.count('"message": "a replica has come"') - output.count('"message": "a replica has left"')

    wait_until(lambda: len(replicas(service, pool)) == number and known() == 4)


def streams_of_both(client: openai.OpenAI) -> list[openai.Stream[Any]]:
    """Of a decoder and of an encoder-decoder in turn, for sessions enough that both generators have some; all have begun."""
    streams = [
        client.completions.create(
            **endless, prompt="a", max_tokens=100_000, stream=True, extra_headers={"x-session-id": f"session-{number}"}
        )
        for number in range(12)
        for endless in ENDLESS
    ]
    for stream in streams:
        assert next(iter(stream))
    return streams


@contextlib.contextmanager
def asking(split: LiveService, *bodies: tuple[str, dict[str, Any]]) -> Iterator[list[tuple[int, float, str | None]]]:
    """Clients that ask again and again, three for each (path, body): status, seconds and Retry-After of every answer so far."""
    outcomes: list[tuple[int, float, str | None]] = []
    enough = threading.Event()

    def ask(path: str, body: dict[str, Any]) -> None:
        while not enough.wait(0.05):
            began = time.monotonic()
            request = urllib.request.Request(f"{split.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    status, retry_after = answer.status, None
            except urllib.error.HTTPError as error:
                status, retry_after = error.code, error.headers["retry-after"]
                error.close()
            outcomes.append((status, time.monotonic() - began, retry_after))

    threads = [threading.Thread(target=ask, args=each) for each in bodies for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        enough.set()
        for thread in threads:
            thread.join(PATIENCE_S)


TEXT = ("/v1/completions", {"model": "tiny-decoder", "prompt": "a", "max_tokens": 20, "ignore_eos": True})
VECTORS = ("/v1/embeddings", {"model": "tiny-encoder", "input": ["three red birds"] * 8})


def test_a_replica_that_hangs_costs_no_request_of_its_pool(split: LiveService, client: openai.OpenAI) -> None:
    """One of two encoders and one of two generators are stopped (SIGSTOP) under load. What they had is asked of the others, and streams go
    on there; both are replaced."""
    streams = streams_of_both(client)
    stopped = [replicas(split, pool)[0] for pool in ("encoder", "generator")]
    replaced = threading.Event()
    with asking(split, TEXT, VECTORS) as outcomes, ThreadPoolExecutor(len(streams)) as readers:
        errors = [readers.submit(error_of, stream, lambda read: replaced.is_set()) for stream in streams]
        wait_until(lambda: len(outcomes) > 30)
        for process in stopped:
            process.suspend()
        wait_until(lambda: not any(process.is_running() for process in stopped))
        until_there_are(split, "encoder", 2)
        until_there_are(split, "generator", 2)
        replaced.set()
    assert {error.result() for error in errors} == {None}
    assert {status for status, *_ in outcomes} == {200}, Counter(status for status, *_ in outcomes)
    assert max(seconds for _, seconds, _ in outcomes) < LONGEST_S


def error_of(stream: openai.Stream[Any], enough: Callable[[int], bool] = lambda read: read == 50) -> str | None:
    """What ends the stream before enough of its chunks are read, if anything does; then it is left."""
    try:
        for read, _ in enumerate(stream):
            if enough(read):
                break
    except openai.APIError as error:
        return str(error)
    finally:
        stream.close()
    return None


def test_a_provider_that_is_missing_stops_the_start(encoder_bundle: Path) -> None:
    """Before Ray, which would look for a GPU for as long as it may."""
    service = LiveService([encoder_bundle], "--profile", "split", "--provider", "cuda")
    service.process.wait(PATIENCE_S)
    assert service.stop() == 1
    assert "error: provider=cuda, but this onnxruntime offers only" in service.output
    assert "starting Ray" not in service.output
    assert "Traceback" not in service.output


def test_the_configuration_is_one_that_serve_takes(encoder_bundle: Path, decoder_bundle: Path) -> None:
    command = [sys.executable, "-m", "service.cli", "config", "--bundle", str(encoder_bundle), "--bundle", str(decoder_bundle)]
    command += ["--encoders", "2", "--max-encoders", "5", "--threads", "3", "--set", "api_keys=do-not-tell", "--provider", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "do-not-tell" not in done.stdout
    (application,) = yaml.safe_load(done.stdout)["applications"]
    deployments = {each["name"]: each for each in application["deployments"]}
    assert set(deployments) == {"gateway", "encoder", "generator"}
    assert deployments["encoder"]["ray_actor_options"]["num_cpus"] == application["args"]["threads"] == 3
    assert [deployments[pool]["ray_actor_options"]["num_gpus"] for pool in ("encoder", "generator")] == [1, 1]
    scaling = deployments["encoder"]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 5)
    assert set(deployments["gateway"]["user_config"]) == set(LIVE)
