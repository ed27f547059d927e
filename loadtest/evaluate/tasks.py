"""Reads tasks from the files that BEIR and mteb use.

Retrieval is a folder: `corpus.jsonl` with a `_id`, `title` (optional) and `text` a line, `queries.jsonl` with `_id` and `text`, and
`qrels/test.tsv` with the columns query, document and grade. Pairs are one file: `sentence1`, `sentence2` and `score` a line. Beside them,
`task.json` may give `name` and `licence`.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from loadtest.errors import LoadtestError

CORPUS, QUERIES, QRELS, PAIRS, ABOUT = "corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "pairs.jsonl", "task.json"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task. `sha256` is the hash of its content, so that figures say what they were measured on."""

    name: str
    licence: str | None
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Retrieval(Task):
    """Queries, and the grades of the documents that answer them. Documents are in descending order of their ids; see `metrics.py`."""

    documents: list[str]
    queries: list[str]
    relevance: list[dict[int, int]]  # of each query: position of a document -> grade


@dataclass(frozen=True, kw_only=True)
class Pairs(Task):
    """Pairs of texts, and how alike each is."""

    first: list[str]
    second: list[str]
    scores: list[float]


def read(path: Path) -> Retrieval | Pairs:
    """Read a task. Raises LoadtestError, which names file, line and value, if a file is missing or not in the form above."""
    about = path / ABOUT if path.is_dir() else path.with_name(ABOUT)
    told = next((content for _, content in _lines(about)), {}) if about.is_file() else {}
    name, licence = str(told.get("name", path.stem)), told.get("licence")
    if path.is_dir() and (path / PAIRS).is_file():
        path = path / PAIRS
    return _retrieval(path, name, licence) if path.is_dir() else _pairs(path, name, licence)


def _retrieval(folder: Path, name: str, licence: str | None) -> Retrieval:
    corpus: dict[str, str] = {}
    for place, line in _lines(folder / CORPUS):
        title = _text(line, "title", place) if line.get("title") else ""
        _add(corpus, line, f"{title} {_text(line, 'text', place)}".strip(), place)
    texts: dict[str, str] = {}
    for place, line in _lines(folder / QUERIES):
        _add(texts, line, _text(line, "text", place), place)
    ids = sorted(corpus, reverse=True)
    places = {document: at for at, document in enumerate(ids)}
    relevance: dict[str, dict[int, int]] = {}
    for place, query, document, grade in _grades(folder / QRELS):
        if query not in texts:
            raise LoadtestError(f"{place}: {query!r:.100} is not the _id of a query in {folder / QUERIES}")
        if document not in places:
            raise LoadtestError(f"{place}: {document!r:.100} is not the _id of a document in {folder / CORPUS}")
        relevance.setdefault(query, {})[places[document]] = grade
    if not relevance:
        raise LoadtestError(f"{folder / QRELS} has no judgement, so nothing can be measured")
    return Retrieval(
        name=name,
        licence=licence,
        sha256=_digest(corpus, {query: texts[query] for query in relevance}, sorted(relevance.items())),
        documents=[corpus[each] for each in ids],
        queries=[texts[query] for query in relevance],
        relevance=list(relevance.values()),
    )


def _pairs(file: Path, name: str, licence: str | None) -> Pairs:
    rows = []
    for place, line in _lines(file):
        score = line.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise LoadtestError(f"{place}: `score` is {json.dumps(score):.100} and must be a number")
        rows.append((_text(line, "sentence1", place), _text(line, "sentence2", place), float(score)))
    if len(rows) < 2:
        raise LoadtestError(f"{file} has {len(rows)} pairs, and a correlation needs at least 2")
    first, second, scores = map(list, zip(*rows, strict=True))
    return Pairs(name=name, licence=licence, sha256=_digest(rows), first=first, second=second, scores=scores)


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the object of each line of a JSONL file, with the place as words, "FILE, line 3"."""
    for place, line in _text_lines(file):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise LoadtestError(f"{place}: {line!r:.100} is not JSON") from None
        if not isinstance(content, dict):
            raise LoadtestError(f"{place}: {line!r:.100} is not a JSON object")
        yield place, content


def _grades(file: Path) -> Iterator[tuple[str, str, str, int]]:
    """Yield place, query, document and grade of each line of a file of judgements. The first line may be a heading."""
    for number, (place, line) in enumerate(_text_lines(file)):
        cells = line.split("\t")
        if number == 0 and cells[-1].strip() == "score":
            continue
        if len(cells) != 3:
            raise LoadtestError(
                f"{place}: {line!r:.100} has {len(cells)} columns, not the 3 of query, document and grade, with tabs between"
            )
        try:
            yield place, cells[0], cells[1], int(cells[2])
        except ValueError:
            raise LoadtestError(f"{place}: the grade {cells[2]!r:.100} is not a whole number") from None


def _text_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that are not empty, each with its place in words."""
    if not file.is_file():
        raise LoadtestError(f"{file} is missing: a task is a folder with {CORPUS}, {QUERIES} and {QRELS}, or a file of pairs in JSONL")
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            place = f"{file}, line {number}"
            try:
                text = line.decode().rstrip("\r\n")
            except UnicodeDecodeError:
                raise LoadtestError(f"{place}: {line!r:.100} is not UTF-8") from None
            if text.strip():
                yield place, text


def _text(line: dict[str, Any], field: str, place: str) -> str:
    value = line.get(field)
    if not isinstance(value, str):
        raise LoadtestError(f"{place}: `{field}` is {json.dumps(value):.100} and must be a text")
    return value


def _add(texts: dict[str, str], line: dict[str, Any], text: str, place: str) -> None:
    if (identity := _text(line, "_id", place)) in texts:
        raise LoadtestError(f"{place}: the _id {identity!r:.100} is there twice")
    texts[identity] = text


def _digest(*content: object) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
