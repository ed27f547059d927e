"""What the files of a package import, for tests of the directions between its folders."""

import ast
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_FILES = 20  # of a folder


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def folder_of(name: str) -> str:
    """`service.http.edge` is of `http`, and a file at the top is a folder of its own."""
    return name.split(".")[1] if "." in name else ""


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@cache
def imported(file: Path) -> frozenset[str]:
    """All modules that a file imports, wherever in it, for types too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in whole if is_module(name)}
            names |= modules if modules == whole else modules | {node.module}
    return frozenset(names)


def libraries(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(file)}


def files_between(package: Path) -> dict[str, set[str]]:
    """For each file of a package, the files of it that it imports."""
    files = {name_of(file): file for file in package.rglob("*.py")}
    return {name: {other for other in imported(file) if other in files and other != name} for name, file in files.items()}


def cycle(arrows: dict[str, set[str]]) -> list[str]:
    """A way from a file back to itself, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(arrows[name]):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next(filter(None, (walk(name, []) for name in sorted(arrows))), [])


def upward(package: Path, order: Sequence[str]) -> list[tuple[str, str]]:
    """Imports from a folder of the package to one that comes after it in `order`, as (file, imported)."""
    rank = {folder: at for at, folder in enumerate(order)}
    arrows = files_between(package)
    own = {name: folder_of(name) for name in arrows}
    return [
        (name, other)
        for name, others in arrows.items()
        for other in sorted(others)
        if own[name] and own[other] and rank[own[other]] > rank[own[name]]
    ]


def crowded(files: Iterable[Path]) -> dict[str, int]:
    """Folders of more than `MOST_FILES` files, with their number."""
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {file.parent for file in files}}
    return {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_FILES}


def undescribed(folder: Path) -> set[str]:
    """Files and folders of a package's folder that the docstring of its `__init__.py`, where a reader begins, does not name."""
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    names = {file.name for file in folder.glob("*.py")} - {"__init__.py"}
    names |= {f"{other.name}/" for other in folder.iterdir() if (other / "__init__.py").exists()}
    return {name for name in names if f"`{name}`" not in said}
