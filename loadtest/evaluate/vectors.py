"""Computes the vectors of texts by the engine, in this process, and keeps them in a file, so that a stopped evaluation continues."""

import asyncio
import io
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from export import contract
from service.call import Call
from service.encoding.model import Model
from service.encoding.request import EncodeRequest
from service.errors import ServiceError
from service.runtime.lanes import Lane
from service.runtime.onnx import Array
from service.terminal import console

Show = Callable[[str, float | None], None]  # shows a step, and the part of it that is done
REQUEST_TEXTS, REQUESTS = 32, 4  # texts of a request, and requests at a time
MOST_BYTES = 8 * 2**30  # of the file; a larger one is emptied before the next evaluation
_SHOWN_EVERY_S = 0.2 if console.is_terminal else 10.0


class VectorFile:
    """Arrays on disk, by the hash of what they are of: bundle, output, role and text."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > MOST_BYTES:
            file.unlink()
        self._database = sqlite3.connect(file)
        self._database.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")

    def __enter__(self) -> "VectorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def __contains__(self, key: bytes) -> bool:
        return self._database.execute("SELECT 1 FROM vectors WHERE key = ?", (key,)).fetchone() is not None

    def read(self, key: bytes) -> Array:
        ((value,),) = self._database.execute("SELECT value FROM vectors WHERE key = ?", (key,))
        array: Array = np.load(io.BytesIO(value), allow_pickle=False)
        return array

    def write(self, arrays: Sequence[tuple[bytes, Array]]) -> None:
        rows = []
        for key, array in arrays:
            with closing(io.BytesIO()) as stream:
                np.save(stream, array, allow_pickle=False)
                rows.append((key, stream.getvalue()))
        with self._database:
            self._database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)


@dataclass(frozen=True)
class Vectors:
    """The vectors that one output gives for some texts, read from the file when they are needed."""

    file: VectorFile
    keys: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Array]:
        return map(self.file.read, self.keys)

    def __getitem__(self, some: slice) -> "Vectors":
        return Vectors(self.file, self.keys[some])


async def compute(
    model: Model, texts: Sequence[str], role: contract.RoleName | None, outputs: Sequence[contract.Output], file: VectorFile, show: Show
) -> dict[contract.Output, Vectors]:
    """Return the vectors of the texts, for each of `outputs`. Texts whose vectors are in the file are not computed again.

    `role`: what the texts are; None: neither queries nor documents, so they get the bundle's default prompt.
    """
    without_evidence = model.manifest.model_copy(update={"evaluations": None}).fingerprint
    keys = {output: [_key(without_evidence, output, role or "", text) for text in texts] for output in outputs}
    missing = {text: at for at, text in enumerate(texts) if not all(keys[output][at] in file for output in outputs)}
    todo = sorted(
        missing.values(), key=lambda at: len(texts[at]), reverse=True
    )  # like lengths together, and the time left is not too short
    requests = iter([todo[first : first + REQUEST_TEXTS] for first in range(0, len(todo), REQUEST_TEXTS)])
    started, shown, done = time.monotonic(), 0.0, 0

    async def work() -> None:
        nonlocal shown, done
        for places in requests:
            rows = await _rows(model, [texts[at] for at in places], role, outputs)
            kept = [
                (keys[output][at], array) for at, row in zip(places, rows, strict=True) for output, array in zip(outputs, row, strict=True)
            ]
            file.write(kept)
            done += len(places)
            if (now := time.monotonic()) > shown + _SHOWN_EVERY_S or done == len(todo):
                shown = now
                words = f"{model.name}, {role or 'text'} {done:,} of {len(todo):,}, {done / (now - started + 1e-9):,.1f} texts/s"
                show(words, done / len(todo))

    await asyncio.gather(*(work() for _ in range(REQUESTS)))
    return {output: Vectors(file, keys[output]) for output in outputs}


async def _rows(
    model: Model, texts: list[str], role: contract.RoleName | None, outputs: Sequence[contract.Output]
) -> list[tuple[Array, ...]]:
    """Return an array of each output for each text."""
    request = EncodeRequest(
        inputs=texts,
        outputs=model.tensors(outputs),
        cut=model.default_cut(True),
        queries=None if role is None else len(texts) if role == "query" else 0,
        number_bytes=0,
    )
    answer = await model.answer(request, Call("evaluate", time.monotonic(), lane=Lane.BULK))
    return [row for row in answer.rows if not isinstance(row, ServiceError)]  # `answer` has raised errors


def _key(*parts: str) -> bytes:
    return sha256("\0".join(parts).encode()).digest()
