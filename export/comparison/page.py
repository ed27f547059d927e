"""Writes the page with all results: compare.md with separate pictures, and compare.html with embedded pictures."""

import base64
import platform
from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort
import torch
from markdown_it import MarkdownIt

from export.comparison import parity, plots, tables
from export.comparison.growth import GROWTH_FROM
from export.comparison.plan import ComparisonPlan
from export.comparison.results import Result
from export.errors import ExportError
from export.folder import now
from models.folders.folder import in_sentences

PICTURES = {"compare-time.svg": "Milliseconds of a run", "compare-memory.svg": "MiB that a run adds", "compare-ranks.svg": "Effective rank"}


def write(results: Mapping[str, Result], plan: ComparisonPlan, out: Path) -> Path:
    """Write the pictures, compare.md and compare.html, and return the path of compare.html."""
    text = _write_markdown(results, plan, out, short=False)
    page = out / "compare.html"
    page.write_text(html(text, out), encoding="utf-8")
    return page


def write_summary(results: Mapping[str, Result], plan: ComparisonPlan, out: Path) -> None:
    """Write the pictures and a compare.md of complexity and growth only. Raises ExportError if a file cannot be written."""
    _write_markdown(results, plan, out, short=True)


def _write_markdown(results: Mapping[str, Result], plan: ComparisonPlan, out: Path, *, short: bool) -> str:
    with in_sentences(f"{out} cannot take the page", ExportError):
        out.mkdir(parents=True, exist_ok=True)
        plots.growth(results, out / "compare-time.svg", what="ms a run", value=plots.seconds)
        plots.growth(results, out / "compare-memory.svg", what="MiB a run adds", value=plots.memory)
        plots.ranks(results, plan, out / "compare-ranks.svg")
        text = markdown(results, plan, out, short=short)
        (out / "compare.md").write_text(text, encoding="utf-8")
    return text


def markdown(results: Mapping[str, Result], plan: ComparisonPlan, out: Path, *, short: bool = False) -> str:
    """Return the page as Markdown, or its beginning and all pictures if `short`. Pictures that do not exist in `out` are left out."""
    missing = [f"`{name}`" + (f" ({result.failure})" if result.failure else "") for name, result in results.items() if not result.complete]
    parts = [
        "# Attention mechanisms side by side\n",
        _about(plan),
        *([f"**Not finished**: {'; '.join(missing)}. The command that began goes on with it.\n"] if missing else []),
        "## The complexity table, measured\n",
        f"Exponents are fitted to time and memory from N = {GROWTH_FROM:,} on, stated ones to the stated formula over the same lengths.\n",
        tables.complexity(results, plan),
        _picture("compare-time.svg", out),
        _picture("compare-memory.svg", out),
        f"### The other letters, at N = {plan.width_length:,}\n",
        "Exponents are fitted to time against the option; a rate divides the work, so its own is negative.\n",
        tables.width_growth(results, plan),
        "## Growth of every mechanism\n",
        tables.every_growth(results, plan),
        *(_rest_is_elsewhere(out) if short else _details(results, plan, out)),
    ]
    return "\n".join(part for part in parts if part)


def _rest_is_elsewhere(out: Path) -> list[str]:
    return [
        "## Rank\n",
        _picture("compare-ranks.svg", out),
        "`attnserve compare` also writes what each can do, parity, ranks, operators and formulas.\n",
    ]


def _details(results: Mapping[str, Result], plan: ComparisonPlan, out: Path) -> list[str]:
    return [
        "## What each can do\n",
        tables.abilities(results),
        "## onnxruntime against torch\n",
        f"The largest difference of an output, both in float32, by B x N; {parity.BAR:g} is the bar.\n",
        tables.parities(results, plan),
        "## Rank\n",
        f"Of the effective matrix at N = {plan.rank_length}, on random tokens, with weights that give queries and keys of variance 1.\n",
        "Numerical / effective rank, the mean over heads. Windows, chunks and codebooks are short here, to show at this length.\n",
        tables.ranks(results, plan),
        _picture("compare-ranks.svg", out),
        "## ONNX operators\n",
        tables.operators(results),
        "## One by one\n",
        *(tables.mechanism(result) for result in results.values()),
        "## Widths\n",
        tables.widths(results),
    ]


def html(text: str, out: Path) -> str:
    """Return the Markdown as one self-contained HTML file."""
    body = MarkdownIt("commonmark").enable("table").render(text)
    for name in PICTURES:
        if (out / name).is_file():
            inside = base64.b64encode((out / name).read_bytes()).decode()
            body = body.replace(f'src="{name}"', f'src="data:image/svg+xml;base64,{inside}"')
    head = f"<meta charset='utf-8'><title>Attention mechanisms</title>\n<style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'>{head}\n{body}</html>\n"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1280px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: 4px 10px 4px 0; text-align: left; vertical-align: top; }
pre { background: #f6f6f6; padding: 10px; overflow-x: auto; font-size: 12.5px; }
img { max-width: 100%; }
"""


def _about(plan: ComparisonPlan) -> str:
    """Return a paragraph on the machine, the versions and the method of the measurements."""
    versions = f"onnxruntime {ort.__version__}, torch {torch.__version__}"
    how = "the exported graph in onnxruntime" if plan.runtime == "onnxruntime" else "the layer in torch"
    return (
        f"Written by `attnserve compare`, {now()}, on {_processor()}; {versions}. Measured is {how}: B = 1, one thread, float32, "
        f"D = {plan.d_model}, H = {plan.n_heads}. Time is the thread's own, memory what a run adds to the resident memory of its process. "
        "The graph computes attention by the operators listed below; in a bundle, softmax attention is one fused operator.\n"
    )


def _processor() -> str:
    named = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{named[0] if named else platform.machine()}, {len(named) or 1} processors"


def _picture(name: str, out: Path) -> str:
    return f"![{PICTURES[name]}]({name})\n" if (out / name).is_file() else ""
