"""The part `encoder`: embeddings of the service beside the bare runtime (ONNX Runtime without a server) and infinity-emb.

Only one side computes at a time. infinity-emb runs in an environment of its own (`make peers`), with its optimum engine and its defaults.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from loadtest.common import machine, memory, texts, wrk
from loadtest.common.benchmark import Benchmark, Figure, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.common.server import Server, Service, free_port
from loadtest.errors import LoadtestError
from loadtest.in_process import bare

BULK_TEXTS, SHORT_BATCH = 2048, 32
SAME_MODEL = 0.999  # smallest cosine of two servers' embeddings; with the same weights, fp32 runtimes differ in the seventh digit
MiB = 2**20
SERVICE, LEAN, PEER, BARE = "attnserve", "attnserve --lean", "infinity", "bare"
TEXTS: dict[str, Callable[[int, str], list[str]]] = {"short": texts.short, "mix": texts.mixed}
CONNECTIONS = {"short": (32, 1), "mix": (32, 8)}


def benchmark(plan: Plan) -> Benchmark:
    """Compare the first bundle. Further ones are served beside it, for memory and start."""
    return Work(plan).benchmark()


class Work:
    """The measurements of a round, and what its later ones need of the earlier ones."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._manifest, self._peer = plan, plan.manifest(0, "encoder"), Path(plan.options["peer"])
        self._round = 0
        self._bare_per_s = dict.fromkeys(("short", "mix"), 1000.0)
        self._costs: dict[int, float] = {}  # tokens of a text -> seconds that the bare runtime needs for it, without padding
        self._vectors: list[list[float]] = []

    def benchmark(self) -> Benchmark:
        loads = {name: partial(self._load, name) for name in TEXTS}
        sides = [
            Side(BARE, {"short": self._bare, "mix": self._bare_mix}),
            Side(
                SERVICE,
                {"start": lambda server: {"start": server.start_s}, **loads, "bulk": self._bulk, "memory": self._memory},
                self._service,
            ),
            Side(PEER, {**loads, "bulk": self._bulk}, self._infinity, optional=True),
            Side(LEAN, {"memory": self._memory}, partial(Service, self._plan.bundles, "--lean", model=self._manifest.name), once=True),
        ]
        absent = {}
        if not (self._peer / "model/model.onnx").exists():
            absent[PEER] = f"infinity-emb is not in {self._peer}: make it with `make peers`"
        return Benchmark(sides, rows(), absent)

    # How sides start -------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _service(self) -> Iterator[Server]:
        self._round += 1
        with Service(self._plan.bundles, model=self._manifest.name) as server:
            server.embed(texts.mixed(64, self._seed("warm")))
            yield server
            self._vectors = server.embed(texts.mixed(8, "the same model?"))

    @contextmanager
    def _infinity(self) -> Iterator[Server]:
        """Start infinity. Raises LoadtestError if its embeddings differ from the bundle's.

        Without `--pooling-method mean` its engine ignores the pooling of the checkpoint. It finds a local model only if it is named `.` and
        its folder is the current one.
        """
        port, folder = free_port(), self._peer.resolve()
        command = [str(folder / "bin/infinity_emb"), "v2", "--engine", "optimum", "--model-id", ".", "--pooling-method", "mean"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        off = {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        env = {**off, "PYTHONPATH": "", "HF_HOME": str(folder / "huggingface")}
        with Server(PEER, command, port=port, ready="/health", path="/embeddings", model=".", env=env, folder=folder / "model") as server:
            if self._vectors:
                cosine = bare.lowest_cosine(server.embed(texts.mixed(8, "the same model?")), self._vectors)
                if cosine < SAME_MODEL:
                    raise LoadtestError(f"infinity serves another model than the bundle: lowest cosine {cosine:.4f}")
            server.embed(texts.mixed(64, self._seed("warm")))
            yield server

    def _seed(self, work: str) -> str:
        return f"attnserve {self._round} {work}"

    # Measurements ------------------------------------------------------------------------------------------------------------------------

    def _run_bare(self, shapes: list[bare.Batch], seconds: float) -> dict[bare.Batch, bare.Timing]:
        """Run the bare runtime with threads that sleep while they wait and with threads that spin, and return the better of each figure."""
        run = partial(bare.measure, self._plan.bundles[0], shapes, threads=machine.cpus(), seconds=seconds)
        asleep, spinning = run(spin=False), run(spin=True)
        better = {"texts_per_s": max, "p50_ms": min}
        return {shape: {name: best(asleep[shape][name], spinning[shape][name]) for name, best in better.items()} for shape in shapes}

    def _bare(self, _: object) -> Figures:
        n = round(statistics.median(bare.token_counts(self._plan.bundles[0], texts.short(50, "length"))))
        batch, one = (SHORT_BATCH, n), (1, n)
        found = self._run_bare([batch, one], self._plan.seconds / 4)
        self._bare_per_s["short"] = found[batch]["texts_per_s"]
        return {"batches": self._bare_per_s["short"], "call": found[one]["p50_ms"]}

    def _bare_mix(self, _: object) -> Figures:
        timings = self._run_bare(bare.shapes_for_mix(self._manifest.limits.max_tokens), max(self._plan.seconds / 20, 0.1))
        self._costs = bare.cost_s({shape: timing["texts_per_s"] for shape, timing in timings.items()})
        lengths = bare.token_counts(self._plan.bundles[0], texts.mixed(len(texts.MIX), "lengths"))
        self._bare_per_s["mix"] = bare.allowed_per_s(lengths, self._costs)
        return {"allowed": self._bare_per_s["mix"]}

    def _load(self, name: str, server: Server) -> Figures:
        """Run wrk with each number of connections. For the service and texts of mixed lengths, also compute the texts/s that the bare
        runtime allows for the same texts."""
        found: dict[str, float | Figure] = {}
        for connections in CONNECTIONS[name]:
            work, seconds = f"{name}, {connections}", self._plan.seconds
            prepared = TEXTS[name](int(3 * self._bare_per_s[name] * max(seconds, 1)) + 4 * connections + 100, self._seed(work))
            before = server.shortcuts() if server.name == SERVICE else 0
            load = wrk.run(server.url + server.path, [server.body(text) for text in prepared], connections=connections, seconds=seconds)
            time.sleep(1)  # wait until the server has finished the requests that wrk left open
            problem = "; ".join([*load.problems, *_shortcut_problem(server, before)])
            # infinity's rate is rounded up: half of its requests that were in flight when the load ended count as answered.
            found[work] = Figure(load.per_s_at_most if server.name == PEER else load.per_s, problem=problem)
            found[f"{work}, p50"] = Figure(load.p50_ms, problem=problem)
            if name == "mix" and self._costs and server.name == SERVICE:
                tokens = bare.token_counts(self._plan.bundles[0], prepared[: max(load.requests, 1)])
                found[f"{work}, allowed"] = bare.allowed_per_s(tokens, self._costs)
        return found

    def _bulk(self, server: Server) -> Figures:
        before = server.shortcuts() if server.name == SERVICE else 0
        elapsed, _ = server.post(server.path, server.body(texts.short(BULK_TEXTS, self._seed("bulk"))))
        return {"bulk": Figure(BULK_TEXTS / elapsed, problem="; ".join(_shortcut_problem(server, before)))}

    def _memory(self, server: Server) -> Figures:
        """Measure the memory (PSS) of all processes after work, so that memory which they have not freed is included."""
        server.embed(texts.mixed(BULK_TEXTS // 8, self._seed("memory")))
        time.sleep(2)
        processes = memory.measure(server.process.pid)
        note = ", ".join(f"{name} {pss_bytes / MiB:.0f}" for name, pss_bytes in processes)
        return {"memory": Figure(sum(pss_bytes for _, pss_bytes in processes) / MiB, note)}


def _shortcut_problem(server: Server, before: float) -> list[str]:
    """Return a problem if the service has answered texts without computing them since it had answered `before` in this way."""
    texts_ = server.shortcuts() - before if server.name == SERVICE else 0
    return [f"{texts_:.0f} texts came from the cache or joined others"] * bool(texts_)


def rows() -> list[Row]:
    short, mix = f"one {texts.SHORT_WORDS}-word text a request", "one text of 6 to 220 words, mostly short"
    bulk, batches = f"one request of {BULK_TEXTS:,} short texts", f"bare runtime, batches of {SHORT_BATCH}"
    best, allowed = (BARE, "batches"), Bar(at_least=0.85, reference="what the bare runtime allows")
    made = [
        Row(f"{short}, 32 connections", "texts/s", (SERVICE, "short, 32"), best, Bar(at_least=0.85, reference=batches)),
        Row("the same, beside infinity", "texts/s", (SERVICE, "short, 32"), (PEER, "short, 32")),
        Row(f"{short}, 1 connection, p50", "ms", (SERVICE, "short, 1, p50"), (BARE, "call"), Bar(at_most_more=2, reference="bare call")),
        Row("the same, infinity", "ms", (PEER, "short, 1, p50")),
        Row(f"{mix}, 32 connections", "texts/s", (SERVICE, "mix, 32"), (SERVICE, "mix, 32, allowed"), allowed),
    ]
    for connections, times in ((32, 2.0), (8, 1.4)):
        key, bar = f"mix, {connections}", Bar(at_least=times, reference="infinity-emb")
        made.append(Row(f"{mix}, {connections} connections", "texts/s", (SERVICE, key), (PEER, key), bar))
    made.append(Row(bulk, "texts/s", (SERVICE, "bulk"), best, Bar(at_least=0.9, reference=batches)))
    made.append(Row("the same, beside infinity", "texts/s", (SERVICE, "bulk"), (PEER, "bulk")))
    made += [Row(f"memory of {side}, all processes, PSS", "MiB", (side, "memory")) for side in (SERVICE, LEAN)]
    made.append(Row("`attnserve serve` of an existing bundle to ready", "s", (SERVICE, "start"), bar=Bar(at_most=15)))
    return made
