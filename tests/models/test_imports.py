"""The directions between the kinds of mechanisms, and the folders of the tests."""

from tests.imports import ROOT, crowded, files_between

MODELS = ROOT / "models"
MECHANISMS = ["layers", "scoring", "sparse", "recurrent", "linear", "gated"]  # a file imports its own kind and those before it


def test_no_mechanism_imports_one_of_a_later_kind() -> None:
    assert {folder.name for folder in (MODELS / "attention").iterdir() if (folder / "__init__.py").exists()} == set(MECHANISMS)
    arrows, rank = files_between(MODELS / "attention"), MECHANISMS.index
    kinds = {name: name.split(".")[2] for name in arrows if name.count(".") > 2}
    assert [(name, other) for name, kind in kinds.items() for other in arrows[name] & set(kinds) if rank(kinds[other]) > rank(kind)] == []


def test_the_tests_have_the_folders_of_the_models() -> None:
    tests = ROOT / "tests" / "models"
    folders = {folder.relative_to(tests) for folder in tests.rglob("*") if (folder / "__init__.py").exists()}
    assert [str(folder) for folder in sorted(folders) if not (MODELS / folder / "__init__.py").exists()] == []
    assert crowded(tests.rglob("*.py")) == {}
