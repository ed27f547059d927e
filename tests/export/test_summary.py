"""`attnserve inspect` shows what a person asks of a bundle, and refuses a broken one."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from export import contract
from export.summary import render


def shown(bundle: Path, *, graph: bool = False) -> str:
    console = Console(width=160, file=StringIO())
    with console.capture() as capture:
        console.print(render(bundle, graph=graph))
    return capture.get()


def test_the_facts_and_files_of_a_bundle_are_shown(encoder_bundle: Path) -> None:
    text = shown(encoder_bundle)
    manifest = contract.verify(encoder_bundle)
    facts = [manifest.fingerprint, "64 tokens", "48 wide, mean pooling", "query: 'query: '", "sentence_embedding float32 (B, 48)"]
    assert [fact for fact in facts if fact not in text] == []
    assert [file.name for file in manifest.files if file.sha256 not in text] == []
    assert "█" not in text


def test_what_matters_is_shown_first(encoder_bundle: Path) -> None:
    first = shown(encoder_bundle).split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in first] == ["name", "kind", "answers", "limits", "precision", "size", "fingerprint"]
    assert "/v1/embeddings" in first[2]


def test_a_graph_for_short_texts_is_shown(hybrid_bundle: Path) -> None:
    text = " ".join(shown(hybrid_bundle).split())
    assert "short texts up to 64 tokens: softmax" in text
    assert "200 tokens" in text


def test_the_graph_is_drawn_with_the_longest_bar_for_the_most_frequent_operator(encoder_bundle: Path) -> None:
    bars = [line for line in shown(encoder_bundle, graph=True).splitlines() if "█" in line]
    operators = contract.verify(encoder_bundle).graph.operators
    assert len(bars) == len(operators)
    assert bars[0].split()[0] == max(operators, key=lambda name: operators[name])
    assert [line.count("█") for line in bars] == sorted((line.count("█") for line in bars), reverse=True)


def test_a_changed_bundle_is_not_shown(encoder_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / contract.MANIFEST).write_bytes((encoder_bundle / contract.MANIFEST).read_bytes())
    with pytest.raises(contract.BundleError, match="is missing"):
        render(tmp_path)
