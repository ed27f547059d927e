"""Two tasks that are made from what installed packages carry: no download, and the same for the same versions.

`python-docs`: a query is the name and the first paragraph of a docstring of Python's standard library, and its document is the rest of that
docstring. `numpy-related`: pairs of numpy's functions, by their summaries. The score is 2 if the
docstring of one lists the other under "See Also", 1 if both are of the same part of numpy, else 0.
"""

import ast
import importlib
import json
import platform
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.evaluate.tasks import ABOUT, CORPUS, PAIRS, QRELS, QUERIES

Files = dict[str, list[Any]]  # file -> its lines

_NOT_DOCS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}
_LEAST_WORDS, _LEAST_CHARACTERS = 4, 200  # of a query's summary, and of a document
_NUMPY_PARTS = ("numpy", "numpy.fft", "numpy.linalg", "numpy.random")
_SEE_ALSO = re.compile(r"^See Also\n-+\n(.*?)(?:\n\n[A-Z]|\Z)", re.MULTILINE | re.DOTALL)


def make(name: str, folder: Path) -> Path:
    """Return the folder of the task `name` below `folder`. It is made if it is not there."""
    version, licence, maker = TASKS[name]
    made = folder / f"{name}-{version}"
    if not (made / ABOUT).is_file():
        files = maker()
        for file, lines in files.items():
            (made / file).parent.mkdir(parents=True, exist_ok=True)
            (made / file).write_text(
                "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), encoding="utf-8"
            )
        (made / ABOUT).write_text(json.dumps({"name": made.name, "licence": licence}) + "\n", encoding="utf-8")  # last: the task is whole
    return made


def python_docs() -> Files:
    """Return the files of `python-docs`. The library's sources are parsed, not imported."""
    library = Path(sysconfig.get_path("stdlib"))
    corpus, queries, judgements, seen = [], [], ["query-id\tcorpus-id\tscore"], set[str]()
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if _NOT_DOCS & set(parts) or parts[0].startswith("config-"):
            continue
        for name, summary, rest in _described(file, ".".join(parts).removesuffix(".__init__")):
            query = f"{name}: {summary}"
            if not seen & {summary, rest}:
                seen |= {summary, rest}
                corpus.append({"_id": name, "text": rest})
                queries.append({"_id": name, "text": query})
                judgements.append(f"{name}\t{name}\t1")
    return {CORPUS: corpus, QUERIES: queries, QRELS: judgements}


def _described(file: Path, module: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, summary and the rest of the docstring of each function and class of a file that has a long docstring."""
    try:
        found: list[tuple[str, ast.AST]] = [(module, ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):
        return
    while found:
        name, node = found.pop(0)
        inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        found += [(f"{name}.{each.name}", each) for each in inner] if isinstance(node, ast.Module | ast.ClassDef) else []
        if not isinstance(node, ast.Module):
            assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            summary, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
            summary, rest = " ".join(summary.split()), " ".join(rest.split())
            if len(summary.split()) >= _LEAST_WORDS and len(rest) >= _LEAST_CHARACTERS:
                yield name, summary, rest


def numpy_related() -> Files:
    """Return the files of `numpy-related`: all related pairs, and as many of each other score, drawn by a fixed seed."""
    summaries, parts, related = dict[str, str](), dict[str, str](), set[tuple[str, str]]()
    named = [(part, name) for part in _NUMPY_PARTS for name in sorted(dir(importlib.import_module(part))) if not name.startswith("_")]
    for part, name in named:
        docs = getattr(getattr(importlib.import_module(part), name), "__doc__", None) or ""
        paragraphs = [" ".join(paragraph.split()) for paragraph in docs.split("\n\n")]
        summary = next((each for each in paragraphs if each and not re.match(r"[\w.]+\(", each)), "")  # not the signature of a C function
        if (listed := _SEE_ALSO.search(docs.replace("\n    ", "\n"))) is not None and summary not in summaries.values():  # else an alias
            summaries[name], parts[name] = summary, part
            beginnings = re.findall(r"^([\w., ]+?)(?: :|$)", listed[1], re.MULTILINE)
            related |= {(name, other.strip().rpartition(".")[2]) for each in beginnings for other in each.split(",")}
    near = sorted({(min(pair), max(pair)) for pair in related if pair[0] != pair[1] and summaries.get(pair[1])})
    chosen, others = random.Random(0), {0: set[tuple[str, str]](), 1: set[tuple[str, str]]()}
    while min(map(len, others.values())) < len(near):
        one, other = sorted(chosen.sample(sorted(summaries), 2))
        score = int(parts[one] == parts[other])
        if len(others[score]) < len(near) and (one, other) not in near:
            others[score].add((one, other))
    scored = [(pair, 2) for pair in near] + [(pair, score) for score, found in others.items() for pair in sorted(found)]
    return {PAIRS: [{"sentence1": summaries[a], "sentence2": summaries[b], "score": score} for (a, b), score in scored]}


# Name -> version of what it is made of, licence of the texts, maker of the files.
TASKS: dict[str, tuple[str, str, Callable[[], Files]]] = {
    "python-docs": (platform.python_version(), "PSF-2.0 (docstrings of Python's standard library)", python_docs),
    "numpy-related": (np.__version__, "BSD-3-Clause (docstrings of numpy)", numpy_related),
}
