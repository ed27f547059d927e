"""Reads and writes data folders: collected texts, and their tokens for each requested vocabulary size.

    DATA/
      sources.json               packages, versions, licences, sizes, what was left out and why
      texts/SPLIT.bin            UTF-8, one document after the other; SPLIT is train or held_out
      texts/SPLIT.json           [{package, file, bytes}, ...] in the same order
      tokens-4096/               training reads only this folder and sources.json
        tokenizer.json           trained on the training split only
        train.bin, held_out.bin  uint16, every document is followed by <|endoftext|>
        index.json               sizes, the held-out documents, sha256 of the training tokens

If sources.json has the key `image`, every document is a picture: its first byte is the prompt, and each further byte is a letter for
the grey level of a pixel. A folder is written under another name and renamed when it is complete.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from models.checkpoints.decoder import ImageFormat
from models.folders.folder import read_tokenizer
from models.training.tokenizer import END_OF_TEXT, train_tokenizer
from service.errors import AttnserveError

SOURCES = "sources.json"
SPLITS = ("train", "held_out")
TOKENIZER_BYTES = 24_000_000  # bytes of training text for the tokenizer; more text changes the tokenizer little
BATCH = 256  # number of documents in one call of the tokenizer, which divides them among threads


class CorpusError(AttnserveError, ValueError):
    """The data folder cannot be used. The message names the file and the command that writes it."""


@dataclass(frozen=True, kw_only=True)
class TextDocument:
    package: str
    file: str
    text: str

    @property
    def size_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True, kw_only=True)
class TokenDocument:
    """One document of the split "held_out", as tokens."""

    package: str
    file: str
    size_bytes: int  # bytes of the document's text
    tokens: np.ndarray  # (N,) uint16, ends with <|endoftext|>


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The texts of a data folder as tokens of one vocabulary."""

    vocab_size: int
    end_of_text: int
    tokenizer_file: Path
    train: np.ndarray  # (N,) uint16, a memory map of the file
    train_bytes: int  # bytes of the text whose tokens are `train`
    train_sha256: str
    held_out: tuple[TokenDocument, ...]
    sources: dict[str, Any]
    image: ImageFormat | None = None  # None: the documents are not pictures

    @property
    def bytes_per_token(self) -> float:
        return self.train_bytes / len(self.train)

    @property
    def document(self) -> int | None:
        """The number of tokens of every picture: prompt, pixels and <|endoftext|>. None for text, whose documents differ in length."""
        return None if self.image is None else 1 + self.image.n_pixels + 1


def write_texts(data: Path, splits: Mapping[str, Sequence[TextDocument]], sources: dict[str, Any]) -> None:
    """Write a data folder's texts, and remove the texts and tokens that it had. The splits are train and held_out."""
    data.mkdir(parents=True, exist_ok=True)
    for old in data.glob("tokens-*"):
        shutil.rmtree(old)
    with _new_folder(data / "texts") as folder:
        for split in SPLITS:
            with (folder / f"{split}.bin").open("wb") as file:
                file.writelines(document.text.encode() for document in splits[split])
            entries = [{"package": d.package, "file": d.file, "bytes": d.size_bytes} for d in splits[split]]
            (folder / f"{split}.json").write_text(json.dumps(entries))
    (data / SOURCES).write_text(json.dumps(sources, indent=1) + "\n")


def read_texts(data: Path, split: str) -> Iterator[TextDocument]:
    """Yield the documents of a split, in order. Raises CorpusError if no text was collected in `data`."""
    folder = data / "texts"
    if not folder.is_dir():
        raise CorpusError(f"{folder} is missing; collect text with `python -m models.training collect --out {data}`")
    _check_files(folder / f"{split}.bin", folder / f"{split}.json")
    with (folder / f"{split}.bin").open("rb") as file:
        for entry in json.loads((folder / f"{split}.json").read_text()):
            yield TextDocument(package=entry["package"], file=entry["file"], text=file.read(entry["bytes"]).decode())


def open_tokens(data: Path, *, vocab_size: int) -> Tokens:
    """Return the tokens of a data folder. They are computed and stored at the first call. Raises CorpusError if the folder cannot be used,
    TokenizerError if its text is too small for the vocabulary.
    """
    if not 257 <= vocab_size <= 65_536:
        raise CorpusError(f"vocab_size={vocab_size} must be 257 (256 bytes and <|endoftext|>) to 65536 (tokens are stored as uint16)")
    folder = data / f"tokens-{vocab_size}"
    if not folder.is_dir():
        _tokenize(data, folder, vocab_size)
    _check_files(data / SOURCES, *(folder / name for name in ("index.json", "held_out.bin", "train.bin", "tokenizer.json")))
    index = json.loads((folder / "index.json").read_text())
    held_out, documents, start = np.memmap(folder / "held_out.bin", np.uint16, mode="r"), [], 0
    for entry in index["held_out"]:
        tokens = held_out[start : start + entry["tokens"]]
        documents.append(TokenDocument(package=entry["package"], file=entry["file"], size_bytes=entry["bytes"], tokens=tokens))
        start += entry["tokens"]
    sources = json.loads((data / SOURCES).read_text())
    train = np.memmap(folder / "train.bin", np.uint16, mode="r")
    for name, tokens in (("train.bin", train), ("held_out.bin", held_out)):
        if (largest := int(tokens.max())) >= vocab_size:
            raise CorpusError(
                f"{folder / name} has a token {largest}, and vocab_size={vocab_size}: remove {folder}, and run the command again"
            )
    return Tokens(
        vocab_size=vocab_size,
        end_of_text=index["end_of_text"],
        tokenizer_file=folder / "tokenizer.json",
        train=train,
        train_bytes=index["train"]["bytes"],
        train_sha256=index["train"]["sha256"],
        held_out=tuple(documents),
        sources=sources,
        image=_image(sources["image"], folder / "tokenizer.json") if "image" in sources else None,
    )


def _check_files(*files: Path) -> None:
    for file in files:
        if not file.is_file():  # checked first, because opening a pipe would block
            raise CorpusError(
                f"{file} is missing or is not a regular file; run `python -m models.training collect` to make the folder again"
            )


def _image(described: dict[str, Any], tokenizer_file: Path) -> ImageFormat:
    """Return the format of the pictures, from its description in sources.json. The letters of the grey levels are replaced by their
    token ids.
    """
    vocabulary = read_tokenizer(tokenizer_file).get_vocab()
    return ImageFormat(
        width=described["width"],
        height=described["height"],
        level_token_ids=tuple(vocabulary[letter] for letter in described["letters"]),
        prompts=tuple(described["prompts"]),
    )


def _tokenize(data: Path, target: Path, vocab_size: int) -> None:
    with _new_folder(target) as folder:
        tokenizer = train_tokenizer(_sample(data), vocab_size=vocab_size)
        tokenizer.save(str(folder / "tokenizer.json"))
        entries = {split: _encode(data, split, tokenizer, folder / f"{split}.bin") for split in SPLITS}
        index = {
            "end_of_text": tokenizer.token_to_id(END_OF_TEXT),
            "train": {
                "bytes": sum(entry["bytes"] for entry in entries["train"]),
                "sha256": hashlib.sha256((folder / "train.bin").read_bytes()).hexdigest(),
            },
            "held_out": entries["held_out"],
        }
        (folder / "index.json").write_text(json.dumps(index))


def _sample(data: Path) -> Iterator[str]:
    """Yield the first documents. They are a random sample, because the documents are ordered by hash."""
    total = 0
    for document in read_texts(data, "train"):
        total += document.size_bytes
        if total > TOKENIZER_BYTES:
            return
        yield document.text


def _encode(data: Path, split: str, tokenizer: Tokenizer, file: Path) -> list[dict[str, Any]]:
    """Write the tokens of the split to `file`. Return for each document its package, file, number of bytes and number of tokens."""
    documents, entries, end = list(read_texts(data, split)), [], tokenizer.token_to_id(END_OF_TEXT)
    starts = range(0, len(documents), BATCH)
    with file.open("wb") as out:
        for start in track(starts, f"{split} into tokens", console=Console(stderr=True), transient=True):
            batch = documents[start : start + BATCH]
            for document, encoding in zip(batch, tokenizer.encode_batch_fast([d.text for d in batch]), strict=True):
                tokens = np.array([*encoding.ids, end], np.uint16)
                out.write(tokens.tobytes())
                entries.append({"package": document.package, "file": document.file, "bytes": document.size_bytes, "tokens": len(tokens)})
    return entries


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. At the end of the `with` block it is renamed to `folder`, unless the block raised an error."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
