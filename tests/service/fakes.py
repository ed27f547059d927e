"""A runtime without a model, a bundle without weights, and an application on top of them.

`FakeSession` gives rows that depend on the ids alone, can be held at a gate and told to fail, and remembers what it was asked.
`fake_bundle` writes a bundle that such a session satisfies; `fake_app`, `client` and `serve_in_thread` put HTTP around it. Nothing sleeps:
every wait is for an event, and bounded.
"""

import asyncio
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer

from export import contract
from service.app import Application, build_app
from service.catalog import Catalog
from service.encoding import sparse
from service.encoding.engine import EncoderEngine
from service.generation import step_engine
from service.http.connections import Connection
from service.runtime.onnx import Array
from service.settings import Settings
from tests.wordpiece import wordpiece

WIDTH = 16  # D of an embedding
HIDDEN = 12  # D_model of token vectors
PATIENCE_S = 120.0  # seconds; no wait takes this long on any machine: it is a hang, and fails the test

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_WORDS = (
    "the a of and to in is it for on cat dog bird fish tree river stone house paris berlin london france germany capital query passage "
    "search document ready what where who how one two three four five six seven eight nine ten red green blue small large"
)
WORDS = _WORDS.split()
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_MARKS = ".,:;!?-_'\"()[]{}<>/\\@#$%^&*+=|~`"
VOCABULARY = list(dict.fromkeys([*SPECIAL, *WORDS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), *_MARKS, "é", "日", "本"]))
SPARSE_WIDTH = len(VOCABULARY)
PROMPTS = {"query": "query: ", "document": "passage: "}


class FakeSession:
    """A `service.runtime.onnx.Session`. A row depends on its ids alone: neither batch nor padding changes it."""

    def __init__(self, *, width: int = WIDTH, hidden: int = HIDDEN, n_labels: int = 1, per_token: bool = False) -> None:
        self.provider = "CPUExecutionProvider"
        self.width, self.hidden, self.n_labels, self.per_token = width, hidden, n_labels, per_token
        self.batches: list[list[list[int]]] = []  # every run that began, in order
        self.outputs: list[list[str]] = []
        self.alone: list[bool] = []
        self.unattended: list[list[int]] = []
        self.type_ids: list[list[list[int]] | None] = []
        self.failures: dict[int, BaseException] = {}  # by number of the run, counted from 0 since `forget`
        self.broken = False  # every run fails
        self.bad_rows: dict[tuple[int, ...], float] = {}  # ids -> what every number of their row becomes: nan, inf, 0
        self.active = 0  # runs between entry and exit
        self.most_active = 0
        self._changed = threading.Condition()
        self._permits: int | None = None  # None: the gate is open

    # What the engine calls ---------------------------------------------------------------------------------------------------------------

    def run(
        self,
        outputs: Sequence[str],
        ids: Sequence[list[int]],
        type_ids: Sequence[list[int]] | None,
        unattended: Sequence[int] = (),
        *,
        alone: bool = True,
    ) -> dict[str, Array]:
        with self._changed:
            number = len(self.batches)
            self.batches.append([list(row) for row in ids])
            self.outputs.append(list(outputs))
            self.alone.append(alone)
            self.unattended.append(list(unattended))
            self.type_ids.append(None if type_ids is None else [list(row) for row in type_ids])
            self.active += 1
            self.most_active = max(self.most_active, self.active)
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._permits is None or self._permits > 0, PATIENCE_S):
                    raise TimeoutError("the gate of a FakeSession was never opened")
                if self._permits is not None:
                    self._permits -= 1
            finally:
                self.active -= 1
                self._changed.notify_all()
        if number in self.failures:
            raise self.failures[number]
        if self.broken:
            raise RuntimeError("scripted failure")
        return {name: self._rows(name, ids) for name in outputs}

    def begin(self, ids: list[int], *, within_s: float) -> None:
        """Any length is good."""

    def _rows(self, output: str, ids: Sequence[list[int]]) -> Array:
        longest = max(map(len, ids))
        rows: Array = np.zeros((len(ids), *self._shape(output, longest)), np.float32)
        for at, row in enumerate(ids):
            exact = self.row(output, row)
            if tuple(row) in self.bad_rows:
                exact = np.full_like(exact, self.bad_rows[tuple(row)])
            rows[at, : len(exact)] = exact
        return rows

    def _shape(self, output: str, n: int) -> tuple[int, ...]:
        if output in (contract.TOKEN_EMBEDDINGS, contract.MULTIVECTOR):
            return n, self.hidden
        if output == contract.TOKEN_WEIGHTS:
            return (n,)
        if output == contract.SPARSE:
            return (SPARSE_WIDTH,)
        if output == contract.LOGITS:
            return (n, self.n_labels) if self.per_token else (self.n_labels,)
        return (self.width,)

    # What a test calls -------------------------------------------------------------------------------------------------------------------

    def row(self, output: str, ids: Sequence[int]) -> Array:
        """The exact output of one input: unit (D,) for embeddings, the same 3 times as long for pooled, else of the output's shape."""
        random = np.random.default_rng(zlib.crc32(np.array(ids, np.int64).tobytes()))
        if output == contract.TOKEN_WEIGHTS:
            return random.uniform(1, 2, len(ids)).astype(np.float32)
        if output == contract.SPARSE:
            return random.uniform(-2, 1, SPARSE_WIDTH).clip(0).astype(np.float32)
        if output in (contract.TOKEN_EMBEDDINGS, contract.MULTIVECTOR):
            tokens = random.standard_normal((len(ids), self.hidden)).astype(np.float32)
            return tokens / np.linalg.norm(tokens, axis=1, keepdims=True) if output == contract.MULTIVECTOR else tokens
        if output == contract.LOGITS:
            return random.uniform(-4, 4, (len(ids), self.n_labels) if self.per_token else self.n_labels).astype(np.float32)
        vector = random.standard_normal(self.width)
        unit: Array = (vector / np.linalg.norm(vector)).astype(np.float32)
        return unit if output == contract.EMBEDDING else unit * np.float32(3)

    def hold(self) -> None:
        """Close the gate: runs enter, and wait there."""
        with self._changed:
            self._permits = 0

    def release(self, runs: int = 1) -> None:
        """Let that many waiting or coming runs pass."""
        with self._changed:
            assert self._permits is not None, "hold() first"
            self._permits += runs
            self._changed.notify_all()

    def open(self) -> None:
        """Let all pass, from now on."""
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    async def entered(self, runs: int) -> None:
        """Until so many runs have begun since `forget`, finished or not."""
        await asyncio.to_thread(self.wait, lambda: len(self.batches) >= runs)

    async def idle(self) -> None:
        """Until no run is inside."""
        await asyncio.to_thread(self.wait, lambda: not self.active)

    def wait(self, condition: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), f"{len(self.batches)} runs entered, {self.active} inside"

    def forget(self) -> None:
        """Start the log and the count of runs anew, after a warm-up."""
        with self._changed:
            self.batches, self.outputs, self.alone, self.unattended, self.type_ids, self.most_active = [], [], [], [], [], 0

    def reset(self) -> None:
        """Forget all runs, and everything that a test has set."""
        self.failures, self.broken, self.bad_rows = {}, False, {}
        self.open()
        self.forget()


def open_fake(bundle: Path, manifest: contract.Manifest, **_: Any) -> FakeSession:
    """What `Catalog` calls in the place of `OnnxSession`."""
    return FakeSession(
        width=manifest.width if manifest.kind == "encoder" else WIDTH,
        n_labels=max(len(manifest.id2label), 1),
        per_token=manifest.kind == "token_classifier",
    )


def put_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Awaitable[None]]:
    """Return a function that puts the clock of the running event loop forward by some seconds, and lets the timers ring that are due."""
    loop, passed_s = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda time=loop.time: time() + passed_s)

    async def forward(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds
        await asyncio.sleep(0.001)

    return forward


def set_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the clock of decoders' engines to so many seconds after the real time, by which requests are made."""
    forward_s = 0.0

    def to(seconds: float) -> None:
        nonlocal forward_s
        forward_s = seconds

    monkeypatch.setattr(step_engine, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + forward_s))
    return to


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something is so that has no event of its own."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def wait_until(condition: Callable[[], object]) -> None:
    """The same for a thread without a loop."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not so after {PATIENCE_S} s"
        time.sleep(0.01)


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters: only the first ones are tested by `make test`, and all by `make test-all`."""
    return [value if at < count else pytest.param(value, marks=pytest.mark.exhaustive) for at, value in enumerate(values)]


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Name the case of a table, at which a loop over it fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {values!r}"[:1000])
        raise


# A bundle ------------------------------------------------------------------------------------------------------------------------------


def fake_tokenizer() -> Tokenizer:
    """Over words, letters, digits and ASCII marks: every ASCII text has ids, and most words are one token."""
    return wordpiece(VOCABULARY, SPECIAL)


_TOKENIZER = fake_tokenizer()


def fake_ids(text: str, pair: str | None = None) -> list[int]:
    """What that tokenizer makes of a text, or of a pair."""
    ids: list[int] = _TOKENIZER.encode(text, pair).ids
    return ids


def fake_bundle(
    path: Path,
    kind: contract.Kind = "encoder",
    *,
    name: str | None = None,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    max_tokens: int = 64,
    n_labels: int | None = None,
    typed: bool | None = None,
    **manifest: Any,
) -> Path:
    """Write a valid bundle into `path` and give it back. Its graph is a placeholder that only `open_fake` can serve.

    An encoder knows the prompts "query" and "document" unless told otherwise; a reranker has one label, the classifiers three; what is read
    in pairs has token types. Everything else of the manifest can be given by its name.
    """
    path.mkdir(parents=True, exist_ok=True)
    n_labels = n_labels or {"encoder": 1, "reranker": 1}.get(kind, 3)
    typed = kind in ("reranker", "classifier") if typed is None else typed
    labels = {} if kind == "encoder" else {index: f"LABEL_{index}" for index in range(n_labels)}
    tokenizer = fake_tokenizer()
    tokenizer.save(str(path / contract.TOKENIZER))
    (path / contract.GRAPH).write_bytes(f"not a graph: {name or path.name}".encode())

    session = FakeSession(n_labels=n_labels, per_token=kind == "token_classifier")
    output = contract.EMBEDDING if kind == "encoder" else contract.LOGITS
    texts = ("the cat", "where is the capital of france?", "")
    pairs = ("a dog", "paris", "berlin") if kind == "reranker" else None
    rows = []
    for text, pair in zip(texts, pairs or [None] * len(texts), strict=True):
        row = session.row(output, tokenizer.encode(text, pair).ids)
        rows.append(tuple(float(number) for number in (row[0] if row.ndim == 2 else row)))
    golden = contract.Golden(
        texts=texts,
        pairs=pairs,
        outputs=tuple(rows),
        **_golden_search(session, [tokenizer.encode(text).ids for text in texts], manifest.get("sparse"), manifest.get("multivector")),
        min_cosine=0.9999 if kind == "encoder" else None,
        max_abs_error=None if kind == "encoder" else 1e-4,
    )
    (path / contract.GOLDEN).write_text(golden.model_dump_json(), encoding="utf-8")

    table = manifest["sparse"].query_table if manifest.get("sparse") else None
    if table is not None:
        np.arange(SPARSE_WIDTH).astype("<f4").tofile(path / table)  # the weight of a token is its id

    digests = [(file, contract.sha256(path / file), (path / file).stat().st_size) for file in [*_FILES, *([table] if table else [])]]
    fields: dict[str, Any] = {
        "name": name or path.name,
        "kind": kind,
        "precision": "fp32",
        "files": tuple(contract.File(name=file, sha256=digest, size_bytes=size) for file, digest, size in digests),
        "graph": _graph(kind, n_labels, typed, {name: manifest.get(name) for name in ("sparse", "multivector")}),
        "limits": contract.Limits(max_tokens=max_tokens, vocab_size=tokenizer.get_vocab_size()),
        "source": contract.CheckpointSource(
            architecture="FakeModel", checkpoint="fake", weights_sha256="0" * 64, attention="softmax", untrained=False
        ),
        "parity": contract.Parity(max_abs_error=0.0, min_cosine=1.0, shapes=((1, 2),), tolerance=1e-5),
        "pooling": "mean" if kind == "encoder" else None,
        "normalized": kind == "encoder",
        "width": WIDTH if kind == "encoder" else n_labels,
        "prompts": dict((PROMPTS if kind == "encoder" else {}) if prompts is None else prompts),
        "default_prompt": default_prompt,
        "id2label": labels,
        "score_activation": {"encoder": "identity", "reranker": "sigmoid"}.get(kind, "softmax"),
        "created": "2026-01-02T03:04:05+00:00",
        "tool": "fakes",
        **manifest,
    }
    (path / contract.MANIFEST).write_text(contract.dump(contract.Manifest(**fields)), encoding="utf-8")
    return path


def _golden_search(
    session: FakeSession, ids: Sequence[list[int]], about: contract.Sparse | None, multivector: contract.MultiVector | None
) -> dict[str, Any]:
    """The golden sparse vectors and token matrices of these texts, of the outputs that the bundle has."""
    golden: dict[str, Any] = {}
    if about is not None and about.by_token:
        vectors = [sparse.of_tokens(row, session.row(contract.TOKEN_WEIGHTS, row), about.ignored_ids) for row in ids]
    elif about is not None:
        vectors = [sparse.of_weights(session.row(contract.SPARSE, row)) for row in ids]
    if about is not None:
        parts = [sparse.unpacked(vector) for vector in vectors]
        golden["sparse"] = tuple([contract.GoldenSparse(indices=at.tolist(), weights=weights.tolist()) for at, weights in parts])
    if multivector is not None:
        golden["matrices"] = tuple([tuple(map(tuple, session.row(contract.MULTIVECTOR, row).tolist())) for row in ids])
    return golden


_FILES = (contract.GRAPH, contract.TOKENIZER, contract.GOLDEN)


def _graph(kind: contract.Kind, n_labels: int, typed: bool, search: Mapping[str, Any]) -> contract.Graph:
    width = WIDTH if kind == "encoder" else n_labels
    inputs, outputs = contract.encoder_interface(kind, width, HIDDEN, typed=typed, **search)
    return contract.Graph(
        file=contract.GRAPH,
        opset=20,
        inputs=inputs,
        outputs=outputs,
        operators={"Identity": 1},
        optimisation="none",
    )


# An application ------------------------------------------------------------------------------------------------------------------------


pooled = False  # whether the applications made here stand before a pool; `tests/service/dialects/conftest.py` has them do both


class FakeCatalog(Catalog):
    """A catalog over fake sessions that forgets the runs of the warm-up."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, open_session=self._open)
        self._sessions: dict[str, FakeSession] = {}

    def _open(self, bundle: Path, manifest: contract.Manifest, **_: Any) -> FakeSession:
        session = self._sessions[manifest.name] = open_fake(bundle, manifest)
        return session

    def start(self) -> None:
        for name, model in self.models.items():
            self.session(name).forget()
            model.engine._queue.run_cost_tokens = 16.0  # not what was measured of a session that computes nothing
        super().start()

    def session(self, name: str) -> FakeSession:
        """The session of a model, to hold, break or read it."""
        return self._sessions[name]

    def computing(self, name: str) -> EncoderEngine:
        """The engine of a model, where it computes."""
        engine = self.get(name).engine
        assert isinstance(engine, EncoderEngine)
        return engine


def fake_catalog(*bundles: Path, **settings: Any) -> FakeCatalog:
    """A catalog of these bundles, not yet loaded. Two runs at once unless told otherwise, so that order is never an accident of one."""
    return FakeCatalog(Settings(**{"bundles": bundles, "threads": 2, **settings}))


def fake_app(*bundles: Path, **settings: Any) -> Application:
    """The application over these bundles, its catalog at `app.state.catalog`."""
    catalog: Any = fake_catalog(*bundles, **settings)
    if pooled:
        from tests.service.pool_fakes import FakeGateway

        catalog = FakeGateway(catalog.settings)
    app = build_app(catalog)
    app.state.catalog = catalog
    return app


class Client(httpx.AsyncClient):
    """An HTTP client to an application without a socket."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        super().__init__(transport=httpx.ASGITransport(app), base_url="http://attnserve", **options)
        self.app: Any = app


def app_of(http: httpx.AsyncClient) -> Application:
    """The application of a `client`."""
    assert isinstance(http, Client)
    app: Application = http.app
    return app


@asynccontextmanager
async def client(app: FastAPI, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application started and warm (or failed: see `app.state.catalog.failure`), and an HTTP client to it without a socket."""
    async with app.router.lifespan_context(app):
        await asyncio.wait_for(app.state.catalog.warm.wait(), PATIENCE_S)
        async with Client(app, **options) as http:
            yield http


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.warm = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        app: Any = self.config.app
        await asyncio.wait_for(app.state.catalog.warm.wait(), PATIENCE_S)
        self.warm.set()

    @property
    def port(self) -> int:
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


@contextmanager
def serve_in_thread(app: FastAPI) -> Iterator[str]:
    """A real server on a free loopback port, warm; gives its base URL, without a closing slash."""
    settings: dict[str, Any] = {"lifespan": "on", "ws": "none", "log_level": "warning", "access_log": False, "proxy_headers": False}
    server = _Server(uvicorn.Config(app, http=Connection, host="127.0.0.1", port=0, **settings))
    thread = threading.Thread(target=server.run, name="uvicorn", daemon=True)
    thread.start()
    try:
        assert server.warm.wait(PATIENCE_S)
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
