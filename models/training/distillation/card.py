"""The model card of a distilled encoder."""

from typing import Any

from models.training.cards import MB, Card, held_out_packages, licence_table, table
from models.training.distillation.delta import SOFTMAX_TOKENS

CURVE = "curve.png"


def distillation_card(report: dict[str, Any], sources: dict[str, Any]) -> Card:
    """Return the card. `sources` is the content of sources.json."""
    config, name, limit = report["config"], report["name"], report["teacher_tokens"]
    options = ", ".join(f"{key} {value}" for key, value in config["options"].items())
    changed = ", and changes of the blocks' weights" if config["end_rate"] > 0 else "; nothing of the teacher is changed"
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sources["kinds"]["train"].items())
    return Card(
        tags=["sentence-similarity", "distillation", "linear-attention"],
        about=f"""{report["teacher_name"]} with another attention: `{config["attention"]}` ({options}) in every block, and
{config["n_positions"]:,} positions where
the teacher has {limit:,}; those beyond are the teacher's again from the beginning, t mod {limit}. Its cost grows with the length
of a text, not
with its square. This folder holds the difference to the teacher, {report["delta_bytes"] / MB:.1f} MB:
{report["new_parameters"]:,} new parameters{changed}.
The teacher's weights come from where they are published.""",
        before=[f"python -m models.training assemble --teacher TEACHER --delta THIS_FOLDER --out out/{name}"],
        checkpoint=f"out/{name}",
        figures=[_likeness(report), _beyond(report)],
        data=f"""Texts found on the training machine, {sources["rule"]}: {kinds}. Held out as whole packages:
{held_out_packages(sources)}. `sources.json` lists every package with its licence and size.

{licence_table(sources["packages"])}""",
        amount=f"{config['transfer_steps']} steps of attention transfer, in which every layer gets the teacher's vectors as its input,\n"
        f"and {config['end_to_end_steps']} end to end: {report['tokens'] / 1e6:.2f} million tokens, of texts of {config['shortest']} to "
        f"{config['longest']:,},",
        limits=[
            "It imitates its teacher, faults included, and is made for English: of other scripts it mostly reads single letters.",
            f"Most of its training text is code and its documentation, in texts of up to {config['longest']:,} tokens.",
        ],
    )


def _likeness(report: dict[str, Any]) -> str:
    def likenesses(of: str, unit: str = "") -> str:
        rows = [
            (f"{name}{unit}", str(one["texts"]), f"{one['cosine']:.4f}", f"{one['lowest']:.4f}", f"{one['ranks']:.4f}")
            for name, one in report["likeness"][f"{of}s"].items()
        ]
        return table((of, "texts", "mean cosine", "lowest", "rank correlation"), rows)

    served, config = "", report["config"]
    if config["end_rate"] == 0:  # see `delta.softmax_tokens`
        served = f"""
Both tables are of the student's own attention. A bundle in fp32 does not use it for short texts: up to
{min(SOFTMAX_TOKENS, report["teacher_tokens"]):,} tokens it computes the teacher's softmax attention with the teacher's weights,
so the cosine is 1.
"""
    return f"""## Likeness to the teacher

Held-out texts, of packages of which nothing was trained on, cut at the teacher's {report["teacher_tokens"]:,} tokens. *Cosine*: of the two
embeddings of a text. *Rank correlation*: Spearman's, of the similarities of all pairs of the texts.

{likenesses("kind")}
{served}
{likenesses("length", " tokens")}

![Loss and likeness against steps]({CURVE})"""


def _beyond(report: dict[str, Any]) -> str:
    limit = report["teacher_tokens"]
    head = ("tokens", "texts", "to the teacher, repeated positions", "lowest", "to the mean of pieces", "that teacher to this mean")
    shown = (("teacher", "cosine"), ("teacher", "lowest"), ("pieces", "cosine"), ("teacher_to_pieces", "cosine"))
    rows = [
        (f"{int(N):,}", str(one["teacher"]["texts"]), *(f"{one[of][figure]:.4f}" for of, figure in shown))
        for N, one in report["beyond"].items()
    ]
    return f"""## Beyond {limit:,} tokens

There the teacher has no answer of its own. The student is held against the teacher's softmax attention with the same repeated positions,
and against the mean of the teacher's embeddings of pieces of {limit:,} tokens. Texts that are too short are joined.

{table(head, rows)}"""
