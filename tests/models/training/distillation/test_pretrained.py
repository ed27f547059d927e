"""The distilled encoder that comes with the repository is what its card says, and reaches what was asked of it."""

import json
from pathlib import Path

import models

FOLDER = Path(models.__file__).parent / "pretrained" / "all-MiniLM-L6-v2-linear"


def test_the_difference_is_small_and_complete() -> None:
    names = {"delta.json", "delta.safetensors", "README.md", "curve.png", "run.json", "sources.json"}
    assert {file.name for file in FOLDER.iterdir()} == names
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 16_000_000
    described = json.loads((FOLDER / "delta.json").read_text())
    assert (described["attention"], described["n_positions"]) == ("hybrid", 8_192)


def test_it_is_like_its_teacher_on_text_it_has_not_seen() -> None:
    report = json.loads((FOLDER / "run.json").read_text())
    for found in report["likeness"]["kinds"].values():
        assert found["cosine"] >= 0.985
        assert found["ranks"] >= 0.98
    found = report["likeness"]["kinds"]["all"]
    card = (FOLDER / "README.md").read_text()
    assert f"| {found['cosine']:.4f} | {found['lowest']:.4f} | {found['ranks']:.4f} |" in card
    packages = json.loads((FOLDER / "sources.json").read_text())["packages"]
    splits = {split: {p["name"] for p in packages if p["split"] == split} for split in ("train", "held_out")}
    assert all(splits.values())
    assert not splits["train"] & splits["held_out"]
