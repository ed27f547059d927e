"""Writes the model card of a distilled encoder."""

from typing import Any

from models.training.cards import MB, front_matter, held_out_packages, licence_table, training_section
from models.training.distillation.delta import SOFTMAX_TOKENS


def model_card(report: dict[str, Any], sources: dict[str, Any]) -> str:
    """Return the model card in Markdown. `report` is the content of run.json, `sources` that of sources.json."""
    return "\n\n".join((_head(report), _likeness(report), _beyond(report), _training(report), _data(sources), _limits(report))) + "\n"


def _head(report: dict[str, Any]) -> str:
    config, name, teacher = report["config"], report["name"], report["teacher_name"]
    options = ", ".join(f"{key} {value}" for key, value in config["options"].items())
    return f"""{front_matter(tags=["attnserve", "sentence-similarity", "distillation", "linear-attention"])}

# {name}

{teacher} with another attention: `{config["attention"]}` ({options}) in every block, and {config["n_positions"]:,} positions where the
teacher has {report["teacher_tokens"]:,}. Its cost grows with the length of a text, not with its square. This folder holds the difference
to the teacher, {report["delta_bytes"] / MB:.1f} MB: {report["new_parameters"]:,} new parameters{_changed(report)}.
The teacher's weights come from where they are published.

    python -m models.training assemble --teacher TEACHER --delta THIS_FOLDER --out out/{name}
    attnserve export --checkpoint out/{name} --out bundles/{name}

Positions beyond the teacher's are the teacher's again from the beginning, t mod {report["teacher_tokens"]}.
"""


def _changed(report: dict[str, Any]) -> str:
    return ", and changes of the blocks' weights" if report["config"]["end_rate"] > 0 else "; nothing of the teacher is changed"


def _likeness(report: dict[str, Any]) -> str:
    def rows(found: dict[str, Any], unit: str = "") -> list[str]:
        return [
            f"| {name}{unit} | {one['texts']} | {one['cosine']:.4f} | {one['lowest']:.4f} | {one['ranks']:.4f} |"
            for name, one in found.items()
        ]

    head = "| texts | mean cosine | lowest | rank correlation |\n|---|---|---|---|---|"
    kinds, lengths = report["likeness"]["kinds"], report["likeness"]["lengths"]
    return "\n".join(
        (
            "## Likeness to the teacher",
            "",
            "Held-out texts, of packages of which nothing was trained on, cut at the teacher's",
            f"{report['teacher_tokens']:,} tokens. *Cosine*: of the two embeddings of a text.",
            "*Rank correlation*: Spearman's, of the similarities of all pairs of the texts.",
            "",
            f"| kind {head}",
            *rows(kinds),
            "",
            f"By length, which says more than the mean over kinds:{_exact(report)}",
            "",
            *_served(report),
            f"| length {head}",
            *rows(lengths, " tokens"),
            "",
            "![Loss and likeness against steps](curve.png)",
        )
    )


def _exact(report: dict[str, Any]) -> str:
    block = report["config"]["options"].get("block", 0)
    if report["config"]["attention"] != "hybrid" or not block or report["config"]["end_rate"] > 0:
        return ""
    return f" up to {2 * block} tokens the student computes what its teacher computes, and only beyond is there something to learn."


def _served(report: dict[str, Any]) -> list[str]:
    """Return the paragraph on short texts, if they are served with the teacher's attention; see `delta.softmax_tokens`."""
    if report["config"]["end_rate"] > 0:
        return []
    most = min(SOFTMAX_TOKENS, report["teacher_tokens"])
    return [
        "Both tables are of the student's own attention. A bundle in fp32 does not use it for short texts: up to",
        f"{most:,} tokens it computes the teacher's softmax attention with the teacher's weights, so the cosine is 1.",
        "",
    ]


def _beyond(report: dict[str, Any]) -> str:
    rows = [
        f"| {int(N):,} | {found['teacher']['texts']} | {found['teacher']['cosine']:.4f} | {found['teacher']['lowest']:.4f} "
        f"| {found['pieces']['cosine']:.4f} | {found['teacher_to_pieces']['cosine']:.4f} |"
        for N, found in report["beyond"].items()
    ]
    limit = report["teacher_tokens"]
    return "\n".join(
        (
            f"## Beyond {limit:,} tokens",
            "",
            "There the teacher has no answer of its own. The student is held against the teacher's softmax attention with the same",
            f"repeated positions, and against the mean of the teacher's embeddings of pieces of {limit:,} tokens. Texts that",
            "are too short are joined.",
            "",
            "| tokens | texts | to the teacher, repeated positions | lowest | to the mean of pieces | that teacher to the mean of pieces |",
            "|---|---|---|---|---|---|",
            *rows,
        )
    )


def _training(report: dict[str, Any]) -> str:
    config = report["config"]
    amount = (
        f"{config['transfer_steps']} steps of attention transfer, in which every layer gets the teacher's vectors as its input, and\n"
        f"{config['end_to_end_steps']} end to end: {report['tokens'] / 1e6:.2f} million tokens, of texts of {config['shortest']} to "
        f"{config['longest']:,},\n"
    )
    return training_section(report, amount.rstrip())


def _data(sources: dict[str, Any]) -> str:
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sources["kinds"]["train"].items())
    return "\n".join(
        (
            "## Data",
            "",
            f"Texts found on the training machine, {sources['rule']}: {kinds}. Held out as whole",
            f"packages: {held_out_packages(sources)}. `sources.json` lists every package with its licence and size.",
            "",
            *licence_table(sources["packages"]),
        )
    )


def _limits(report: dict[str, Any]) -> str:
    return f"""## Limits

- It imitates its teacher, faults included, and is made for English: of other scripts it mostly reads single letters.
- Most of its training text is code and its documentation, in texts of up to {report["config"]["longest"]:,} tokens."""
