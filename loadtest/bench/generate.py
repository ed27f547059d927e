"""The part `generate`: text of the service beside its engine, and of the engine beside the bare step loop (the step graph with its buffers
bound; no sampler, no text)."""

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from loadtest.common import machine, wrk
from loadtest.common.benchmark import Benchmark, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.common.server import Server, Service, metrics
from loadtest.in_process import engine, steps
from loadtest.load.figures import percentile

CHUNKS = (16, 64, 256, 1024)
PROMPT_TOKENS = 16_384
FAR = (2_000, 100_000)  # positions at which a step must take the same time
TURNS = 3  # turns per round in steps whose ratios are near the required value
STREAM_TOKENS = 512
SERVICE, ENGINE, BARE = "service", "engine", "bare"


def benchmark(plan: Plan) -> Benchmark:
    work = Work(plan, plan.manifest(0, "decoder").name)
    in_process = {"engine": work.engine, "prefill": work.prefill, "latency": work.latency, "flat": work.flat}
    start = partial(Service, plan.bundles, model=work.model)
    return Benchmark([Side(ENGINE, in_process), Side(SERVICE, {"service": work.service}, start)], rows(work.slots))


class Work:
    def __init__(self, plan: Plan, model: str) -> None:
        self.bundle, self.seconds, self.model = plan.bundles[0], plan.seconds, model
        self.slots, self.threads = int(plan.options["slots"]), machine.cpus()

    def engine(self, _: object) -> Figures:
        """Measure the engine and the bare loop in turns, with one run and with a run for each slot."""
        found: dict[str, float] = {}
        for rows_ in (1, self.slots):
            ours, bare = [], []
            for _turn in range(TURNS):
                bare.append(steps.tokens_per_s(self.bundle, rows_, self.seconds / TURNS, self.threads))
                ours.append(engine.tokens_per_s(self.bundle, rows_, self.seconds / TURNS))
            found |= {f"{rows_} runs": statistics.median(ours), f"{rows_} runs, bare": statistics.median(bare)}
        return found

    def prefill(self, _: object) -> Figures:
        bare = {f"chunks of {chunk}": steps.prefill_tokens_per_s(self.bundle, chunk, self.seconds / 4, self.threads) for chunk in CHUNKS}
        ours = PROMPT_TOKENS / engine.texts_s(self.bundle, 1, prompt_tokens=PROMPT_TOKENS, max_tokens=1)
        return {**bare, "best chunk": max(bare.values()), "prefill": ours}

    def latency(self, _: object) -> Figures:
        alone, during = engine.waits_s(self.bundle, self.seconds)
        median, p99, disturbed = (1000 * float(percentile(waits, n) or 0) for waits, n in ((alone, 50), (alone, 99), (during, 99)))
        return {"median": median, "p99": p99, "disturbed p99": disturbed, "disturbed": disturbed / median}

    def flat(self, _: object) -> Figures:
        near, far = (steps.step_s(self.bundle, self.threads, self.seconds / 2, position=position) for position in FAR)
        return {"flat": far / near}

    def service(self, server: Server) -> Figures:
        """Measure the engine in this process and the service in turns. The service is idle while the engine is measured."""
        ours, streamed = [], []
        for _ in range(TURNS):
            ours.append(engine.tokens_per_s(self.bundle, self.slots, self.seconds / TURNS))
            streamed.append(streams_per_s(server, self.slots, self.seconds / TURNS))
        return {"streams": statistics.median(streamed), "streams, engine": statistics.median(ours)}


def rows(slots: int) -> list[Row]:
    rate, between = "tokens/s", f"between two tokens of {engine.STREAMS} streams"
    beside = f"while a prompt of {engine.LONG_PROMPT:,} tokens is fed"
    loop, engine_bar = (ENGINE, f"{slots} runs, bare"), Bar(at_least=0.9, reference="the bare step loop")
    best = Bar(at_least=0.8, reference="bare prefill in its best chunks")
    alone = Bar(at_least=0.8, reference="the engine alone")
    return [
        Row(f"the engine, {slots} runs", rate, (ENGINE, f"{slots} runs"), loop, engine_bar),
        Row("the engine, 1 run", rate, (ENGINE, "1 runs"), (ENGINE, "1 runs, bare")),
        Row(f"the service, {slots} streams over HTTP", rate, (SERVICE, "streams"), (SERVICE, "streams, engine"), alone),
        Row("a long prompt through the engine", rate, (ENGINE, "prefill"), (ENGINE, "best chunk"), best),
        *(Row(f"bare prefill in chunks of {chunk}", rate, (ENGINE, f"chunks of {chunk}")) for chunk in CHUNKS),
        Row(f"p99 {between} {beside}, against the undisturbed median", "times", (ENGINE, "disturbed"), bar=Bar(at_most=3)),
        *(Row(f"{between}: {name}", "ms", (ENGINE, name)) for name in ("median", "p99", "disturbed p99")),
        Row(f"a step at position {FAR[1]:,} against one at {FAR[0]:,}", "times", (ENGINE, "flat"), bar=Bar(at_most=1.05)),
    ]


# Over HTTP -------------------------------------------------------------------------------------------------------------------------------


def streams_per_s(server: Server, streams: int, seconds: float) -> float:
    """Return the tokens per second that the service samples for `streams` connections. On each, a streamed text is requested and read to
    its end, then the next."""
    asked = {"model": server.model, "stream": True, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    bodies = [json.dumps({**asked, "prompt": f"text {seed}", "seed": seed}) for seed in range(64 * streams)]
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(wrk.run, f"{server.url}/v1/completions", bodies, connections=streams, seconds=2 * seconds + 2)
        time.sleep(1 + seconds / 2)
        before, started = _sampled(server), time.perf_counter()
        time.sleep(seconds)
        after, elapsed = _sampled(server), time.perf_counter() - started
        loading.result()
    return (after - before) / elapsed


def _sampled(server: Server) -> float:
    return sum(metrics(server.url, ["vllm:generation_tokens_total"]).values())
