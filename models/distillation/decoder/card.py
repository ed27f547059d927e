"""Measures a student beside its teacher and windows alone, and writes its model card.

    python -m models.distillation.decoder.card --teacher GGUF --data out/text --student OUT --text FILE...

Every measured figure is kept in OUT/figures.json at once, so that the same command continues after a stop. The card is OUT/README.md.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from models.checkpoints.own import CARD
from models.decoder.model import Decoder
from models.decoder.window import windowed, without_far
from models.distillation.decoder.delta import read_delta, read_student, student_of
from models.distillation.decoder.evaluation import COPY_AT, LENGTHS, NEEDLE_AT, SAMPLE_TOKENS, Reader, bits_per_byte, copy, needle
from models.distillation.decoder.sequences import sequences
from models.distillation.decoder.teacher import load_teacher
from models.distillation.decoder.tuning import TRANSFER
from models.distillation.plot import CURVE
from models.training.cards import MB, front_matter, held_out_packages, licence_table, training_section
from models.training.corpus import SOURCES
from models.training.run import RUN

FIGURES = "figures.json"
FULL, LONG_WINDOW, WINDOW, STUDENT = "full attention (the teacher)", "window of 1,024", "its windows alone", "this model"
PROMPTS = 2  # continuations in the card: of the first held-out texts, cut after AFTER tokens
AFTER = 1_000
# With so many more bits than the teacher needs, what is to be found is called lost: half of what guessing a number takes, and bits a token.
LOST = {"needle": 8.3, "copy": 4.0}
WORSE_BITS = 0.1  # with so many more bits than its windows alone need, the student is called worse than they


class Figures:
    """Figures by name, in a file that every new one is added to."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def of(self, name: str, measure: Callable[[], Any], console: Console) -> Any:
        """Return a figure, which is measured if it is not in the file."""
        if name not in self.found:
            self.found[name] = measure()
            self.file.write_text(json.dumps(self.found, indent=1) + "\n")
            console.print(f"{name}: {self.found[name]}", highlight=False, soft_wrap=True)
        return self.found[name]


def measure(teacher: Path, data: Path, folder: Path, texts: Sequence[Path], longest: int, console: Console) -> dict[str, Any]:
    """Return all figures: name of a measurement -> name of a model -> figure. longest: tokens of the texts of bits per byte."""
    source, tokenizer = load_teacher(teacher)
    models: dict[str, Decoder] = {
        STUDENT: read_student(folder, source).eval(),
        WINDOW: without_far(student_of(read_delta(folder, source), folder, source)).eval(),
        FULL: source.model,
        LONG_WINDOW: windowed(source.model, 1_024),
    }
    readers, figures = {name: Reader(model) for name, model in models.items()}, Figures(folder / FIGURES)
    code = sequences(data, "held_out", tokenizer, context=max(LENGTHS), n=1)[0]
    long = {f"Python ({code[0].package}/{code[0].file})": code[1]}
    if texts:
        joined = tokenizer.encode("\n\n".join(file.read_text() for file in texts), add_special_tokens=False).ids
        long[f"licences ({', '.join(file.name for file in texts)})"] = joined[: max(LENGTHS)]

    def each(kind: str, run: Callable[[Reader], Any], names: Sequence[str] = tuple(models)) -> dict[str, Any]:
        return {name: figures.of(f"{kind}: {name}", partial(run, readers[name]), console) for name in names}

    def bits(N: int) -> dict[str, Any]:
        lengths = [length for length in LENGTHS if length <= N]
        return {
            name: each(f"bits per byte, {N}, {name}", lambda reader, ids=ids: bits_per_byte(reader, ids, tokenizer, lengths))  # type: ignore[misc]
            for name, ids in long.items()
        }

    found: dict[str, Any] = {"bits": bits(min(longest, 2_048)), "needle": {}, "copy": {}, "samples": []}
    filler, three = next(reversed(long.values()))[1_000:], (STUDENT, WINDOW, FULL)
    for kind, places, run in (("needle", NEEDLE_AT, needle), ("copy", COPY_AT, copy)):
        for at in places:
            found[kind][f"{at:,}"] = each(f"{kind}, {at}", lambda reader, run=run, at=at: run(reader, filler, tokenizer, at), three)  # type: ignore[misc]
    for document, ids in sequences(data, "held_out", tokenizer, context=AFTER, n=PROMPTS):
        name = f"{document.package}/{document.file}"
        said = each(f"sample, {name}", lambda reader, ids=ids: reader.continued(ids, SAMPLE_TOKENS), (STUDENT, FULL))  # type: ignore[misc]
        found["samples"].append({"text": name, "end": tokenizer.decode(ids[-30:])} | {one: tokenizer.decode(x) for one, x in said.items()})
    if longest > 2_048:
        found["bits"] = bits(longest)
    return found


def model_card(report: dict[str, Any], sources: dict[str, Any], found: dict[str, Any], transfer: dict[str, Any] | None = None) -> str:
    """Return the model card in Markdown. `report` is the content of run.json, `sources` that of sources.json.

    transfer: for a tuned student, run.json of the attention transfer before, if it is known.
    """
    if is_tuned(report):
        training = (_tuning(report), _training_of_tuning(report, transfer), _data_of_tuning(report, sources))
        sections = (_head(report), _bits(found, tuned=True), _recall(found), training[0], _samples(found), *training[1:])
        return "\n\n".join((*sections, _limits_of_tuning(report, found))) + "\n"
    head = (_head(report), _bits(found, tuned=False), _recall(found))
    sections = (*head, _layers(report), _samples(found), _training(report), _data(report, sources))
    return "\n\n".join((*sections, _limits())) + "\n"


def is_tuned(report: dict[str, Any]) -> bool:
    """Whether run.json is that of a tuning; otherwise it is that of an attention transfer."""
    return "changed_parameters" in report


def _head(report: dict[str, Any]) -> str:
    config = report["config"]
    window, n_first = (report["window"], report["options"]["n_first"]) if is_tuned(report) else (config["window"], config["n_first"])
    held = f"""maps alone, {report["delta_bytes"] / MB:.1f} MB in float16 ({report["parameters"]:,} numbers)."""
    if is_tuned(report):
        held = f"""maps ({report["parameters"]:,} numbers) and low-rank changes of projections (rank {config["rank"]},
{report["changed_parameters"]:,} numbers), {report["delta_bytes"] / MB:.1f} MB in float16."""
    return f"""{front_matter(tags=["attnserve", "text-generation", "distillation", "linear-attention"])}

# {report["name"]}

{report["teacher_name"]} with a state of constant size. {_attention(report, window)}, the first
{n_first} among them, and by learned feature maps (`causal_hybrid`) to all tokens that left this window. This folder holds the
{held} All other weights are those of the teacher,
which comes from where it is published.

    python -m models.distillation.decoder.delta --teacher TEACHER.gguf --delta THIS_FOLDER --out out/{report["name"]}
    attnserve export --checkpoint out/{report["name"]} --out bundles/{report["name"]} --precision int8-rough"""


def _attention(report: dict[str, Any], window: int) -> str:
    if not (long := report.get("long")):
        return f"Every layer attends exactly to {window} tokens"
    numbers = ", ".join(map(str, sorted(long["layers"])))
    return f"""{len(long["layers"])} layers (counted from 0: {numbers}) attend to
{long["window"]:,} tokens (`sink_window`). Each other layer attends exactly to {window} tokens"""


def _table(head: str, rows: dict[str, dict[str, float]], form: str) -> list[str]:
    names = list(next(iter(rows.values())))
    return [
        f"| {head} | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
        *(f"| {row} | {' | '.join(format(value, form) for value in values.values())} |" for row, values in rows.items()),
    ]


def _bits(found: dict[str, Any], *, tuned: bool) -> str:
    up_to_window = "" if tuned else "; up to the window all are equal"
    lines = ["## Bits per byte", "", f"Of the first N tokens of one held-out text each. Fewer are better{up_to_window}."]
    for name, by_model in found["bits"].items():
        lengths = list(next(iter(by_model.values())))
        rows = {f"{int(N):,}": {model: bits[N] for model, bits in by_model.items()} for N in lengths}
        last = {model: bits[lengths[-1]] for model, bits in by_model.items()}
        lines += ["", *_table(name, rows, ".4f"), "", *_ratios(int(lengths[-1]), last)]
    return "\n".join(lines)


def _ratios(N: int, bits: dict[str, float]) -> list[str]:
    """Say how this model and its windows alone compare with others, if they were measured."""
    return [
        f"At {N:,} tokens this model needs {bits[STUDENT] / bits[other]:.3f} times the bits of {other}; its windows alone need "
        f"{bits[WINDOW] / bits[other]:.3f} times."
        for other in (LONG_WINDOW, FULL)
        if other in bits and WINDOW in bits
    ]


def _recall(found: dict[str, Any]) -> str:
    return "\n".join(
        (
            "## Needle and copy",
            "",
            "A number of five digits, asked for after so many tokens: the bits of the answer (a guess: 16.6, near 0: found).",
            "",
            *_table("tokens between", found["needle"], ".2f"),
            "",
            "A list of words that comes again after so many tokens: bits per token of the second time.",
            "",
            *_table("tokens between", found["copy"], ".2f"),
        )
    )


def _layers(report: dict[str, Any]) -> str:
    ours, window = zip(*report["layers"], strict=True)
    rows = [f"| {number} | {a:.4f} | {b:.4f} | {a / b:.2f} |" for number, (a, b) in enumerate(report["layers"])]
    return "\n".join(
        (
            "## Error of each layer",
            "",
            "Squared error of a layer's outputs, divided by their square, on held-out text beyond the window.",
            f"Mean: {sum(ours) / len(ours):.4f}, of the window alone {sum(window) / len(window):.4f}.",
            "",
            "| layer | this model | window alone | ratio |",
            "|---|---|---|---|",
            *rows,
            "",
            f"![Errors against steps]({CURVE})",
        )
    )


def _samples(found: dict[str, Any]) -> str:
    lines = [
        "## Samples",
        "",
        f"The most probable {SAMPLE_TOKENS} tokens after the first {AFTER:,} of the first {PROMPTS} held-out texts; not chosen.",
    ]
    for sample in found["samples"]:
        lines += ["", f"**{sample['text']}**, which ends with", "", *_quoted(sample["end"])]
        for model in (STUDENT, FULL):
            lines += ["", f"{model}:", "", *_quoted(sample[model])]
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    return [f"    {line}" for line in text.split("\n")]


def _training(report: dict[str, Any]) -> str:
    config = report["config"]
    return training_section(
        report,
        f"{len(_read(report))} texts of {config['context']:,} tokens, each read once by the teacher, with {config['parts']} steps a text\n"
        f"in which all layers learn apart from each other to give the outputs of softmax attention: {report['step']} steps",
    )


def _data(report: dict[str, Any], sources: dict[str, Any]) -> str:
    read = _read(report)
    used = {text.partition("/")[0] for text in read}
    return "\n".join(
        (
            "## Data",
            "",
            f"The beginnings of {len(read)} long documents of {sources['rule']}.",
            f"Held out as whole packages: {held_out_packages(sources)}. The packages of the documents that were read:",
            "",
            *licence_table(package for package in sources["packages"] if package["name"] in used),
            "",
            *(f"- {text}" for text in read),
        )
    )


def _read(report: dict[str, Any]) -> list[str]:
    """Return the names of the texts that the run has read; it may have ended before the last one."""
    texts: list[str] = report["data"]["texts"]
    return texts[: math.ceil(report["step"] / report["config"]["parts"])]


def _limits() -> str:
    return """## Limits, and what is next

- Only the maps are trained, in minutes on one core, on Python and its documentation. The outputs of layers get nearer to
  the teacher's, but that hardly helps to predict the next token: what it needs of far tokens is mostly single ones, such as
  a name that comes again.
- What a sum over keys cannot hold, such as a number to repeat, is lost beyond the window: see needle and copy.
- The run was stopped and continued with a shorter limit, and its learning rate fell and rose again: the same command does not
  give the same bits. Texts of 4,096 and 8,192 tokens were not measured.
- With a GPU-day: attention transfer on some 20 million tokens of general text, of 8,192 tokens a text, then low-rank
  changes of the projections on the loss of the next token, the paper's second phase, which is not done here."""


# A tuned student


def _tuning(report: dict[str, Any]) -> str:
    first, last = report["evaluations"][0], report["evaluations"][-1]
    lengths = sorted({int(key.rpartition("_")[2]) for key in last if "_bits_" in key})
    rows = {"KL(teacher, this model), nats a token": (first["student_kl"], last["student_kl"], last["window_kl"], None, 0.0)}
    kinds = [("", "bits per byte"), ("python_", "of the Python files among them")]
    for kind, of in kinds[: 1 if all(name.endswith(".py") for name in report["data"]["held_out"]) else 2]:
        for N in lengths:
            names = ("window", "long_window", "teacher")
            values = (first.get(f"{kind}student_bits_{N}"), *(last.get(f"{kind}{name}_bits_{N}") for name in ("student", *names)))
            if values[0] is not None:
                rows[f"{of}, {N:,} tokens"] = values
    table = [f"| {name} | {' | '.join('' if value is None else f'{value:.4f}' for value in values)} |" for name, values in rows.items()]
    return "\n".join(
        (
            "## Tuning",
            "",
            f"Of {len(report['data']['held_out'])} held-out texts, on the device that trained: before and after the tuning.",
            "",
            f"| | before | this model | {WINDOW} | {LONG_WINDOW} | {FULL} |",
            "|---|---|---|---|---|---|",
            *table,
            "",
            f"![Divergence and bits against steps]({CURVE})",
        )
    )


def _training_of_tuning(report: dict[str, Any], transfer: dict[str, Any] | None) -> str:
    config, label = report["config"], report["config"]["label_share"]
    loss = "the divergence of the next token's distribution from the teacher's, KL(teacher || student), at all tokens"
    if label:
        loss += f", and with a share of {label:g} the loss of the true next token"
    tokens = report["tokens"]
    changed = "attention and feed-forward layers" if config["feedforward"] else "attention layers (q, k, v and output)"
    section = training_section(
        report,
        f"Second phase: feature maps, and changes of rank {config['rank']} of all projections of the {changed}.\n"
        f"The loss is {loss}.\n"
        f"{report['step']:,} steps of {config['batch']} texts of {config['context']:,} tokens: {tokens / MB:.1f} million tokens, of "
        f"{report['texts_read']:,} different texts,",
    )
    for before in report.get("tuned_before", []):
        section += (
            f"\n\nBefore, a tuning of {before['step']:,} steps, {before['tokens'] / MB:.1f} million tokens, "
            f"in {before['seconds'] / 60:.1f} minutes on\n{before['hardware']}, {before['date']}."
        )
    if transfer is None or is_tuned(transfer):
        return section
    return section + (
        f"\n\nBefore, attention transfer of the maps alone: {transfer['step']} steps in {transfer['seconds'] / 60:.1f} minutes on\n"
        f"{transfer['hardware']}, {transfer['date']}."
    )


def _data_of_tuning(report: dict[str, Any], sources: dict[str, Any]) -> str:
    used = set(report["packages_read"])
    return "\n".join(
        (
            "## Data",
            "",
            f"Pieces of {report['config']['context']:,} tokens of documents of {sources['rule']}.",
            f"Held out as whole packages: {held_out_packages(sources)}. The packages of the documents that were read, with the size of all",
            "that was collected of them:",
            "",
            *licence_table(package for package in sources["packages"] if package["name"] in used),
        )
    )


def _limits_of_tuning(report: dict[str, Any], found: dict[str, Any]) -> str:
    config, lines = report["config"], ["## Limits, and what is next", ""]
    minutes, context = report["seconds"] / 60, config["context"]
    lines.append(f"- Tuned for {minutes:.1f} minutes on Python and its documentation, on texts of {context:,} tokens and no longer ones.")
    for name, by_model in found["bits"].items():
        N = list(by_model[STUDENT])[-1]
        ours, alone, full = (by_model[model][N] for model in (STUDENT, WINDOW, FULL))
        if alone > full:
            back = (alone - ours) / (alone - full)
            text = f"{name.partition(' ')[0]}, {int(N):,} tokens"
            lines.append(f"- {text}: of the bits that its windows alone lose, {back:.0%} are won back.")
    for kind, told in (("needle", "a number to find"), ("copy", "a list to repeat")):
        lines += [f"- {line}" for line in _recalled(kind, found[kind], told)]
    if not config["label_share"]:
        lines.append("- The loss has no true tokens: what was won is the teacher's knowledge, not that of the training text.")
    lines.append("- Up to the window it is no longer its teacher, since its projections were changed: see the first rows of bits per byte.")
    return "\n".join(lines)


def _recalled(kind: str, by_place: dict[str, dict[str, float]], told: str) -> list[str]:
    """Say at which distances the student needs far more bits than its teacher, and at which it needs more than its windows alone."""
    far = [at for at, bits in by_place.items() if bits[STUDENT] > bits[FULL] + LOST[kind]]
    worse = [at for at, bits in by_place.items() if bits[STUDENT] > bits[WINDOW] + WORSE_BITS]
    lines = [f"What a sum over keys cannot hold is lost beyond the windows: {told} after {' and '.join(far)} tokens."] if far else []
    if worse:
        lines.append(f"Its windows alone need fewer bits for {told} after {' and '.join(worse)} tokens.")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.distillation.decoder.card", description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True, help="checkpoint folder or GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="folder that `python -m models.training.collect` wrote")
    parser.add_argument("--student", type=Path, required=True, help="folder of an attention transfer or of a tuning")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files that are joined to one more long text")
    parser.add_argument("--longest", type=int, choices=LENGTHS, default=max(LENGTHS), help="tokens of the longest text")
    options = parser.parse_args(arguments)
    found = measure(options.teacher, options.data, options.student, options.text, options.longest, Console())
    report, sources = (json.loads((options.student / name).read_text()) for name in (RUN, SOURCES))
    before = options.student / TRANSFER
    transfer = json.loads(before.read_text()) if before.is_file() else None
    (options.student / CARD).write_text(model_card(report, sources, found, transfer), encoding="utf-8")


if __name__ == "__main__":
    main()
