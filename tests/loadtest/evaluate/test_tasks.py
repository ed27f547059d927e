"""Tasks are read in the forms of BEIR and mteb, and bad files are refused with file, line and value."""

import json
import re
import sysconfig
from pathlib import Path

import pytest

from loadtest.errors import LoadtestError
from loadtest.evaluate import made
from loadtest.evaluate.tasks import Pairs, Retrieval, read
from tests.service.fakes import case

CORPUS = '{"_id": "a", "title": "Cats", "text": "the cat"}\n\n{"_id": "b", "title": "", "text": "the dog"}\n{"_id": "c", "text": "fish"}\n'
QUERIES = '{"_id": "1", "text": "cat"}\n{"_id": "2", "text": "dog"}\n{"_id": "3", "text": "not judged"}\n'
QRELS = "query-id\tcorpus-id\tscore\n1\ta\t2\n1\tb\t0\n2\tb\t1\n"
PAIR = '{"sentence1": "cat", "sentence2": "dog", "score": 2.5}\n'


def beir(folder: Path, **files: str | bytes) -> Path:
    """Write a task in the form of BEIR. `files`: other content of corpus, queries or qrels."""
    for name, path, content in (
        ("corpus", "corpus.jsonl", CORPUS),
        ("queries", "queries.jsonl", QUERIES),
        ("qrels", "qrels/test.tsv", QRELS),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        given = files.get(name, content)
        (folder / path).write_bytes(given if isinstance(given, bytes) else given.encode())
    return folder


def test_a_folder_is_read_as_beir_does(tmp_path: Path) -> None:
    task = read(beir(tmp_path / "animals"))
    assert isinstance(task, Retrieval)
    assert (task.name, task.licence) == ("animals", None)
    assert task.documents == ["fish", "the dog", "Cats the cat"], "the largest id first, which is trec_eval's order of equal scores"
    assert task.queries == ["cat", "dog"], "a query without judgements is not measured"
    assert task.relevance == [{2: 2, 1: 0}, {1: 1}]
    other = read(beir(tmp_path / "other", qrels=QRELS.replace("2\tb\t1", "2\tc\t1")))
    assert other.sha256 != task.sha256


def test_a_file_of_pairs_is_read_as_mteb_does(tmp_path: Path) -> None:
    file = tmp_path / "sts.jsonl"
    file.write_text(PAIR + PAIR.replace("2.5", "0"))
    (tmp_path / "task.json").write_text('{"name": "STS", "licence": "CC0-1.0"}\n')
    task = read(file)
    assert isinstance(task, Pairs)
    assert (task.name, task.licence, task.first, task.second, task.scores) == ("STS", "CC0-1.0", ["cat"] * 2, ["dog"] * 2, [2.5, 0])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"corpus": CORPUS + "{\n"}, "corpus.jsonl, line 5: '{' is not JSON"),
        ({"corpus": CORPUS + "[1]\n"}, "corpus.jsonl, line 5: '[1]' is not a JSON object"),
        ({"corpus": CORPUS.encode() + b"\xff\n"}, "corpus.jsonl, line 5: b'\\xff\\n' is not UTF-8"),
        ({"corpus": CORPUS + '{"_id": "a", "text": ""}\n'}, "corpus.jsonl, line 5: the _id 'a' is there twice"),
        ({"corpus": CORPUS + '{"_id": 7, "text": ""}\n'}, "corpus.jsonl, line 5: `_id` is 7 and must be a text"),
        ({"corpus": CORPUS + '{"_id": "d", "title": 7, "text": ""}\n'}, "corpus.jsonl, line 5: `title` is 7 and must be a text"),
        ({"queries": QUERIES + '{"_id": "4"}\n'}, "queries.jsonl, line 4: `text` is null and must be a text"),
        ({"qrels": QRELS + "2 c 1\n"}, "test.tsv, line 5: '2 c 1' has 1 columns, not the 3"),
        ({"qrels": QRELS + "2\tc\thigh\n"}, "test.tsv, line 5: the grade 'high' is not a whole number"),
        ({"qrels": QRELS + "9\tc\t1\n"}, "test.tsv, line 5: '9' is not the _id of a query in"),
        ({"qrels": QRELS + "2\tz\t1\n"}, "test.tsv, line 5: 'z' is not the _id of a document in"),
        ({"qrels": "query-id\tcorpus-id\tscore\n"}, "test.tsv has no judgement"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_line_is_named_with_its_value(files: dict[str, str | bytes], words: str, tmp_path: Path) -> None:
    with pytest.raises(LoadtestError, match=re.escape(words)):
        read(beir(tmp_path / "task", **files))


def test_bad_pairs_and_missing_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    for content, words in (
        (PAIR, f"{file} has 1 pairs"),
        (PAIR + PAIR.replace("2.5", '"2"'), f'{file}, line 2: `score` is "2" and must be a number'),
        (PAIR + PAIR.replace("2.5", "NaN"), f"{file}, line 2: `score` is NaN and must be a number"),
        (PAIR + '{"sentence1": "cat", "score": 1}\n', f"{file}, line 2: `sentence2` is null"),
    ):
        with case(content):
            file.write_text(content)
            with pytest.raises(LoadtestError, match=re.escape(words)):
                read(file)
    (queries := beir(tmp_path / "task") / "queries.jsonl").unlink()
    with pytest.raises(LoadtestError, match=re.escape(f"{queries} is missing")):
        read(queries.parent)


def test_a_task_is_made_of_docstrings_with_their_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = "Opens and reads it, whatever it is. " * 8
    docstring = f'"""Return all lines of the file.\n\n        {rest}\n        """'
    source = f'class Reader:\n    """Read one file at a time."""\n    def read(self):\n        {docstring}\n'
    (tmp_path / "library" / "test").mkdir(parents=True)
    for name in ("files.py", "files2.py", "test/files.py"):
        (tmp_path / "library" / name).write_text(source if name != "files2.py" else source.replace("all lines", "all the lines"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "library"))
    task = read(folder := made.make("python-docs", tmp_path / "tasks"))
    assert isinstance(task, Retrieval)
    assert task.queries == ["files.Reader.read: Return all lines of the file."], "each document once, and none of tests"
    assert task.documents == [" ".join(rest.split())]
    assert task.licence is not None
    assert "PSF-2.0" in task.licence
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "files.Reader.read", "text": "kept"}) + "\n")
    again = read(made.make("python-docs", tmp_path / "tasks"))
    assert isinstance(again, Retrieval)
    assert again.queries == ["kept"], "a task that is there is not made again"


def test_pairs_are_made_of_numpys_docstrings_the_same_each_time(tmp_path: Path) -> None:
    one, other = (read(made.make("numpy-related", tmp_path / name)) for name in "ab")
    assert isinstance(one, Pairs)
    assert one.sha256 == other.sha256
    assert {score: one.scores.count(score) for score in (0, 1, 2)} == dict.fromkeys((0, 1, 2), len(one.scores) // 3)
    assert all(first and second and first != second for first, second in zip(one.first, one.second, strict=True))
    assert one.licence is not None
    assert one.licence.startswith("BSD-3-Clause")
