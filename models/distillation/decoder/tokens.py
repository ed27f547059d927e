"""Pretokenised texts for tuning, in one small file, so that a GPU machine needs neither the collected text nor a tokenizer.

    python -m models.distillation.decoder.tokens --teacher GGUF --data out/text --out out/tokens.npz

    train         (n, N) uint16, sequences of N tokens: pieces of documents, Python files and documentation in turns
    held_out      (m, N) uint16, beginnings of held-out documents, as `sequences.py` gives them
    names, held_out_names   what each sequence is from: package/file
    sources       the content of sources.json

A document of more than N tokens gives several sequences. Its rest, and shorter documents, are joined with others of the same package.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer

from models.distillation.decoder.sequences import sequences
from models.distillation.decoder.teacher import load_teacher
from models.training.corpus import SOURCES, CorpusError, TextDocument, read_texts

END_OF_TEXT = "<|endoftext|>"  # between joined documents, if the tokenizer has it
LARGEST_VOCABULARY = 1 << 16
MOST_PIECES = 6  # sequences of one document
WRITTEN_BY = "python -m models.distillation.decoder.tokens"
Ids = NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """The content of the file."""

    train: Ids  # (n, N)
    held_out: Ids  # (m, N)
    names: tuple[str, ...]
    held_out_names: tuple[str, ...]
    sources: dict[str, Any]

    @property
    def context(self) -> int:
        """N."""
        return int(self.train.shape[1])

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.train.tobytes() + self.held_out.tobytes()).hexdigest()


def make_tokens(data: Path, tokenizer: Tokenizer, *, context: int, n: int, held_out: int) -> TokenFile:
    """Return at most n training sequences and `held_out` others, from a folder that `models.training.collect` wrote.

    Raises CorpusError if the folder cannot be used, or if it has no training sequence or too few held-out ones.
    """
    if (size := tokenizer.get_vocab_size()) > LARGEST_VOCABULARY:
        raise CorpusError(f"the tokenizer has {size:,} tokens, and the file has 16 bits for each: at most {LARGEST_VOCABULARY:,}")
    end = tokenizer.token_to_id(END_OF_TEXT)
    found: dict[bool, list[tuple[str, list[int]]]] = {True: [], False: []}
    rests: dict[tuple[bool, str], tuple[list[str], list[int]]] = defaultdict(lambda: ([], []))
    for document in read_texts(data, "train"):
        is_python = document.file.endswith(".py")
        kind, rest = found[is_python], rests[is_python, document.package]
        kind += _pieces(document, tokenizer, context, rest, end)
        if sum(map(len, found.values())) >= n and min(map(len, found.values())) >= n // 2:
            break
    mixed = [one for pair in _in_turns(found[True], found[False]) for one in pair][:n]
    if not mixed:
        raise CorpusError(f"{data} has no training sequence of {context} tokens; collect more text, or choose a shorter context")
    others = sequences(data, "held_out", tokenizer, context=context, n=held_out)
    return TokenFile(
        train=np.array([ids for _, ids in mixed], np.uint16),
        held_out=np.array([ids for _, ids in others], np.uint16),
        names=tuple(name for name, _ in mixed),
        held_out_names=tuple(f"{document.package}/{document.file}" for document, _ in others),
        sources=json.loads((data / SOURCES).read_text()),
    )


def _pieces(
    document: TextDocument, tokenizer: Tokenizer, context: int, rest: tuple[list[str], list[int]], end: int | None
) -> Iterator[tuple[str, list[int]]]:
    """Yield the sequences of a document. What is left of it is added to `rest`, the files and tokens of earlier rests of its package."""
    name, ids = f"{document.package}/{document.file}", tokenizer.encode(document.text, add_special_tokens=False).ids
    whole = min(len(ids) // context, MOST_PIECES)
    for number in range(whole):
        yield name, ids[number * context : (number + 1) * context]
    if whole == MOST_PIECES:
        return
    files, joined = rest
    files.append(name)
    joined += ids[whole * context :] + ([] if end is None else [end])
    if len(joined) >= context:
        yield name if len(files) == 1 else f"{files[0]} and {len(files) - 1} more", joined[:context]
        files.clear()
        joined.clear()


def _in_turns(first: list[Any], second: list[Any]) -> Iterator[list[Any]]:
    for at in range(max(len(first), len(second))):
        yield first[at : at + 1] + second[at : at + 1]


def write_tokens(file: Path, tokens: TokenFile) -> int:
    """Write the file and return its size in bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        np.savez_compressed(
            out,
            train=tokens.train,
            held_out=tokens.held_out,
            names=np.array(json.dumps(tokens.names)),
            held_out_names=np.array(json.dumps(tokens.held_out_names)),
            sources=np.array(json.dumps(tokens.sources)),
        )
    return file.stat().st_size


def read_tokens(file: Path, *, vocab_size: int) -> TokenFile:
    """Read the file. Raises CorpusError if it is missing, damaged, or has tokens beyond the vocabulary."""
    if not file.is_file():
        raise CorpusError(f"{file} is missing or is not a regular file; `{WRITTEN_BY}` writes it")
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            tokens = TokenFile(
                train=arrays["train"],
                held_out=arrays["held_out"],
                names=tuple(json.loads(str(arrays["names"]))),
                held_out_names=tuple(json.loads(str(arrays["held_out_names"]))),
                sources=json.loads(str(arrays["sources"])),
            )
    except (BadZipFile, EOFError, KeyError, OSError, ValueError) as error:
        raise CorpusError(f"{file} cannot be read ({error}); write it again with `{WRITTEN_BY}`") from error
    for name, ids, names in (("train", tokens.train, tokens.names), ("held_out", tokens.held_out, tokens.held_out_names)):
        if ids.ndim != 2 or ids.dtype != np.uint16 or not ids.size or len(names) != len(ids) or ids.shape[1] != tokens.context:
            raise CorpusError(
                f"{file}: {name} has the shape {ids.shape}, {ids.dtype} and {len(names)} names; write it again with `{WRITTEN_BY}`"
            )
        if (largest := int(ids.max())) >= vocab_size:
            raise CorpusError(f"{file}: {name} has a token {largest}, and the teacher has a vocabulary of {vocab_size}; give its teacher")
    return tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=WRITTEN_BY, description=__doc__.partition("\n")[0])
    parser.add_argument("--teacher", type=Path, required=True, help="checkpoint folder or GGUF file, for its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="folder that `python -m models.training.collect` wrote")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .npz")
    parser.add_argument("--context", type=int, default=4_096, help="tokens of a sequence (4,096)")
    parser.add_argument("--sequences", type=int, default=2_200, help="most training sequences (2,200)")
    parser.add_argument("--held-out", type=int, default=8, help="held-out sequences (8)")
    options = parser.parse_args(arguments)
    tokenizer = load_teacher(options.teacher)[1]
    tokens = make_tokens(options.data, tokenizer, context=options.context, n=options.sequences, held_out=options.held_out)
    size = write_tokens(options.out, tokens)
    python = sum(name.partition(" and ")[0].endswith(".py") for name in tokens.names)
    Console().print(
        f"{options.out}: {len(tokens.names):,} sequences of {tokens.context:,} tokens ({python:,} of Python), "
        f"{len(tokens.held_out_names)} held out, {size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
