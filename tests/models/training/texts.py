"""A small data folder: made-up Python of three packages to train on and two held out, the same every time."""

import random
from pathlib import Path
from typing import Any

from models.training.config import TrainingConfig
from models.training.corpus import TextDocument, write_texts

VERBS = ("read", "write", "merge", "split", "close", "open")
NOUNS = ("table", "index", "file", "user", "queue", "node")
SOURCES = {
    "rule": "made up for tests",
    "packages": [
        {
            "name": "p0",
            "version": "1.0",
            "licence": "MIT",
            "licence_field": "License",
            "split": "train",
            "files": 20,
            "bytes": 9000,
            "left_out": {},
        },
        {
            "name": "q0",
            "version": "2.0",
            "licence": "ISC",
            "licence_field": "License",
            "split": "held_out",
            "files": 6,
            "bytes": 3000,
            "left_out": {},
        },
    ],
    "refused": [],
    "totals": {"train": {"bytes": 9000, "files": 60}, "held_out": {"bytes": 3000, "files": 12}},
}


def small_config(**changes: Any) -> TrainingConfig:
    """A run of 20 steps with a model of two narrow layers, unless said otherwise."""
    model = {"layers": "causal_linear", "d_model": 16, "n_layers": 2, "n_heads": 2, "d_feedforward": 32}
    values = {"name": "tiny", "model": model, "vocab_size": 300, "context": 24, "batch": 4, "max_steps": 20, "learning_rate": 0.01}
    return TrainingConfig(**{**values, "evaluations": 2, "threads": 1, **changes})


def changed(config: TrainingConfig, **values: object) -> TrainingConfig:
    return TrainingConfig.model_validate(config.model_dump() | values)


def documents(packages: tuple[str, ...], *, files: int, seed: int) -> list[TextDocument]:
    drawn = random.Random(seed)
    return [
        TextDocument(package=package, file=f"{package}/{i}.py", text="".join(_function(drawn) for _ in range(drawn.randrange(2, 9))))
        for package in packages
        for i in range(files)
    ]


def write_data(data: Path) -> Path:
    train = documents(("p0", "p1", "p2"), files=20, seed=0)
    write_texts(data, {"train": train, "held_out": documents(("q0", "q1"), files=6, seed=1)}, SOURCES)
    return data


def _function(drawn: random.Random) -> str:
    verb, noun = drawn.choice(VERBS), drawn.choice(NOUNS)
    body = f"    if {noun} is None:\n        return {drawn.randrange(100)}\n    return self.{verb}({noun})\n"
    return f"def {verb}_{noun}(self, {noun}):\n{body}\n\n"
