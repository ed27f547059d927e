"""What follows from the kind of a model is in one table, `KINDS` in export/contract/tensors.py, and nothing else asks for the kind."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from export import contract
from tests.imports import ROOT

SERVED = {"DecoderModel", "Generator", "Model"}
FILES = [*sorted((ROOT / "service").rglob("*.py")), *sorted((ROOT / "export" / "contract").glob("*.py"))]


def questions(source: str) -> list[str]:
    """Comparisons of a kind with the name of one, and isinstance of the class of a served model."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            parts = [each for side in (node.left, *node.comparators) for each in ast.walk(side)]
            asks = any(getattr(each, "attr", getattr(each, "id", None)) in ("kind", "kinds") for each in parts)
            if asks and any(isinstance(each, ast.Constant) and each.value in contract.KINDS for each in parts):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            named = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            found += [ast.unparse(node)] if named & SERVED else []
    return found


def test_the_table_has_every_kind() -> None:
    assert tuple(contract.KINDS) == get_args(contract.Kind)
    assert {*contract.kinds_of("encoder"), *contract.kinds_of("generator")} == set(contract.KINDS)


def test_the_console_has_an_example_for_every_kind() -> None:
    examples = (ROOT / "service/console/source/src/lib/examples.js").read_text(encoding="utf-8")
    assert set(re.findall(r"case '(\w+)':", examples)) == set(contract.KINDS)


@pytest.mark.parametrize("code", ["model.manifest.kind == 'encoder'", "kind not in ('reranker', 'classifier')", "isinstance(found, Model)"])
def test_a_question_is_found(code: str) -> None:
    assert questions(code) == [code]


def test_nothing_asks_for_the_kind() -> None:
    def of(file: Path) -> list[str]:
        return questions(file.read_text(encoding="utf-8"))

    assert {str(file.relative_to(ROOT)): of(file) for file in FILES if of(file)} == {}
