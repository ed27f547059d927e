"""The bars, and which measurements answer to them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadtest.bench.rounds import BULK_TEXTS, SHORT_BATCH, Part, Plan
from loadtest.common.report import Bar, Row
from loadtest.common.texts import SHORT_WORDS

MIX_TEXTS = "one text of 6 to 220 words, mostly short"
BARE_BATCH = f"bare onnxruntime, batches of {SHORT_BATCH}"
MiB = 1024 * 1024

Measurements = Sequence[Mapping[str, Any]]


def rows(plan: Plan, measured: Measurements, peer_missing: str | None) -> list[Row]:
    """One row for each bar of the plan's parts, passed or not, and below it what stands beside it."""
    made: list[Row] = []
    if Part.short in plan.parts:
        made += _short(measured)
    if Part.mix in plan.parts:
        made += _mix(measured, peer_missing)
    if Part.bulk in plan.parts:
        made += _bulk(measured)
    if Part.memory in plan.parts:
        made += _memory(measured)
    if Part.start in plan.parts:
        figures = _pick(measured, "start", "attnserve", lambda raw: raw["seconds"])
        made.append(Row(work="`attnserve serve` of an existing bundle to ready", unit="s", figures=figures, bar=Bar(at_most=15)))
    return made


def _short(measured: Measurements) -> list[Row]:
    work = f"one {SHORT_WORDS}-word text ({_tokens(measured)} tokens) a request"
    many, one = "short, 32 connections", "short, 1 connection"
    bare_many = _best_bare(measured, "short", lambda raw: raw["batch"]["texts_per_s"], max)
    bare_one = _best_bare(measured, "short", lambda raw: raw["one"]["p50_ms"], min)
    callers = _pick(measured, "short", "bare, a caller for each thread", lambda raw: raw["batch"]["texts_per_s"])
    return [
        _row(measured, many, f"{work}, 32 connections", bar=Bar(at_least=0.85, reference=BARE_BATCH), references=bare_many),
        _row(measured, many, "the same, infinity", contestant="infinity"),
        Row(work=f"{BARE_BATCH}, a caller for each thread", unit="texts/s", figures=callers),
        _row(measured, one, f"{work}, 1 connection, p50", "ms", _p50, bar=Bar(at_most_more=2, reference="bare call"), references=bare_one),
        _row(measured, one, "the same, infinity", "ms", _p50, contestant="infinity"),
    ]


def _mix(measured: Measurements, peer_missing: str | None) -> list[Row]:
    many, few = "mix, 32 connections", "mix, 8 connections"
    allowed = _pick(measured, many, "attnserve", lambda raw: raw["allowed_per_s"])
    bar = Bar(at_least=0.85, reference="what bare onnxruntime allows")
    return [
        _row(measured, many, f"{MIX_TEXTS}, 32 connections", bar=bar, references=allowed),
        _beside_peer(measured, many, f"{MIX_TEXTS}, 32 connections", 2.0, peer_missing),
        _beside_peer(measured, few, f"{MIX_TEXTS}, 8 connections", 1.4, peer_missing),
    ]


def _beside_peer(measured: Measurements, work: str, told: str, at_least: float, peer_missing: str | None) -> Row:
    """The peer's figure is taken at its most, and must be as sound as ours."""
    peer = _pick(measured, work, "infinity", lambda raw: raw["per_s_at_most"])
    problems = [f"infinity: {problem}" for problem in _problems(measured, work, "infinity")]
    note = "; ".join(problems) or ("" if peer else peer_missing or "")
    bar = Bar(at_least=at_least, reference="infinity-emb, optimum engine")
    return _row(measured, work, told, bar=bar, references=peer, note=note, invalid_reference=bool(problems))


def _bulk(measured: Measurements) -> list[Row]:
    bare = _best_bare(measured, "bulk", lambda raw: raw["batch"]["texts_per_s"], max)
    work = f"one request of {BULK_TEXTS:,} short texts"
    return [
        _row(measured, "bulk", work, bar=Bar(at_least=0.9, reference=BARE_BATCH), references=bare),
        _row(measured, "bulk", "the same, infinity", contestant="infinity"),
    ]


def _memory(measured: Measurements) -> list[Row]:
    made = []
    for contestant in ("attnserve", "attnserve --lean"):
        entries = _entries(measured, "memory", contestant)
        note = ", ".join(f"{process['name']} {process['pss_bytes'] / MiB:.0f}" for process in entries[-1]["processes"]) if entries else ""
        haproxy = ", HAProxy on" if contestant == "attnserve" else ""
        figures = tuple(entry["pss_bytes"] / MiB for entry in entries)
        made.append(Row(work=f"memory of {contestant} with one model{haproxy}, all processes, PSS", unit="MiB", figures=figures, note=note))
        idle = tuple(entry["idle_cores"] * 100 for entry in entries)
        made.append(Row(work=f"processor time of {contestant} while idle", unit="% of a core", figures=idle))
    return made


def _row(
    measured: Measurements,
    work: str,
    told: str,
    unit: str = "texts/s",
    figure: Callable[[Mapping[str, Any]], float] | None = None,
    *,
    contestant: str = "attnserve",
    bar: Bar | None = None,
    references: tuple[float, ...] = (),
    note: str = "",
    invalid_reference: bool = False,
) -> Row:
    problems = _problems(measured, work, contestant)
    return Row(
        work=told,
        unit=unit,
        figures=_pick(measured, work, contestant, figure or _per_s),
        references=references,
        bar=bar,
        note="; ".join(filter(None, [*problems, note])),
        invalid=bool(problems) or invalid_reference,
    )


def _per_s(raw: Mapping[str, Any]) -> float:
    return float(raw["per_s"])


def _p50(raw: Mapping[str, Any]) -> float:
    return float(raw["wrk"]["p50_ms"])


def _entries(measured: Measurements, work: str, contestant: str) -> list[Mapping[str, Any]]:
    return [entry for entry in measured if entry["work"] == work and entry["contestant"] == contestant]


def _pick(measured: Measurements, work: str, contestant: str, figure: Callable[[Mapping[str, Any]], float]) -> tuple[float, ...]:
    """The figure of each round, in order."""
    return tuple(figure(entry) for entry in _entries(measured, work, contestant))


def _problems(measured: Measurements, work: str, contestant: str) -> list[str]:
    return [problem for entry in _entries(measured, work, contestant) for problem in entry.get("problems", [])]


def _best_bare(
    measured: Measurements, work: str, figure: Callable[[Mapping[str, Any]], float], best: Callable[[list[float]], float]
) -> tuple[float, ...]:
    """Of each round the better of spinning and not: the harder to reach."""
    by_round: dict[int, list[float]] = {}
    for entry in _entries(measured, work, "bare"):
        by_round.setdefault(entry["round"], []).append(figure(entry))
    return tuple(best(values) for _, values in sorted(by_round.items()))


def _tokens(measured: Measurements) -> str:
    return str(next((entry["tokens"] for entry in _entries(measured, "short", "bare")), "?"))
