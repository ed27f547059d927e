"""What the pages and docstrings may name: files, folders, modules, symbols, routes, make targets, commands and flags that exist."""

import ast
import fnmatch
import os
import re
import subprocess
import sys
import tokenize
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from service.app import build_app
from tests.docs.pages import ROOT
from tests.service.fakes import fake_catalog

PACKAGES = ("service", "models", "export", "loadtest", "deploy", "tests")
# Where a path that is given without its beginning may be: ARCHITECTURE names the files of the service by their folders.
BASES = ("", "service", "models", "deploy")
MADE = ("out/", "bundles/", "data/", "path/to/", ".venv/")  # by commands; not in the repository
FILE = re.compile(r"[\w.*-]+(/[\w.*-]+)*\.(py|md|yaml|yml|toml|env|tpl|lua|png|svg|conf|gz)")
FOLDER = re.compile(r"[\w.-]+(/[\w.-]+)*/")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_WORD = re.compile(r"[A-Za-z_][\w-]*")


@cache
def files() -> tuple[str, ...]:
    """Every file of the repository, tracked or new."""
    listed = subprocess.check_output(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True)
    return tuple(name for name in listed.splitlines() if (ROOT / name).is_file())


@cache
def basenames() -> frozenset[str]:
    return frozenset(Path(name).name for name in files())


@cache
def folders() -> frozenset[str]:
    return frozenset(str(parent) for name in files() for parent in Path(name).parents)


def has_file(name: str, beside: Path) -> bool:
    """`name` may contain `*`. It is relative to the root, to one of `BASES`, to `beside` or its parent, or without any folder.

    Private files of Ray count too: `ray/serve/_private/replica.py`, and `node.py` in `ray/_private`.
    """
    if name.startswith(MADE):
        return True
    if name.startswith("ray/"):
        return (ray() / name).exists()
    if "/" not in name.lstrip("./"):
        in_ray = (ray() / "ray/_private" / name).is_file()
        return in_ray or name.lstrip("./") in basenames() or bool("*" in name and fnmatch.filter(basenames(), name))
    return any(list(base.glob(name)) for base in (*(ROOT / each for each in BASES), beside, beside.parent))


def ray() -> Path:
    """The folder of packages in which Ray is installed: docstrings name its private files."""
    spec = find_spec("ray")
    assert spec is not None
    return Path(str(spec.origin)).parents[1]


def has_folder(name: str, beside: Path) -> bool:
    if f"{name}/".startswith(MADE):
        return True
    return any(name == each or each.endswith(f"/{name}") for each in folders()) or (beside / name).is_dir()


@cache
def words() -> frozenset[str]:
    """All identifiers in code and data, with and without hyphens."""
    found: set[str] = set()
    for name in files():
        if name.endswith((".py", ".yaml", ".env", ".toml", ".tpl", ".lua", ".sh", ".conf", ".json", "Makefile", "Dockerfile", ".txt")):
            if name.startswith(("tests/docs/", "service/docs_assets/")) or "package-lock" in name:
                continue
            text = (ROOT / name).read_text(encoding="utf-8")
            found |= set(_WORD.findall(text)) | set(re.findall(r"\w+", text))
    return frozenset(found)


@cache
def source() -> str:
    """All code and data in one string."""
    kinds = (".py", ".yaml", ".env", ".tpl", "Makefile", "Dockerfile")
    return "\n".join((ROOT / name).read_text() for name in files() if name.endswith(kinds) and not name.startswith("tests/docs/"))


@cache
def texts() -> dict[str, str]:
    """The Python files, by path."""
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in files() if name.endswith(".py")}


def called(name: str) -> list[str]:
    """The texts of all modules of this name, without folders and suffix; of a package, that of its `__init__.py`."""
    return [
        text for path, text in texts().items() if name == (Path(path).parent.name if path.endswith("/__init__.py") else Path(path).stem)
    ]


def has_word(word: str, found: list[str]) -> bool:
    return any(re.search(rf"\b{word}\b", text) for text in found)


def has_module(name: str) -> bool:
    """`service.http.edge`, or something inside of it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = "/".join(parts[:count])
        if (text := texts().get(f"{path}.py", texts().get(f"{path}/__init__.py"))) is not None:
            return count == len(parts) or has_word(parts[count], [text])
    return False


def has_symbol(name: str) -> bool:
    """`Settings.host`: the second name is a word of the file that has the class or module of the first. Of others, all are words."""
    first, second = name.split(".")[:2]
    found = [text for text in texts().values() if re.search(rf"^class {first}\b", text, re.MULTILINE)] or called(first)
    return has_word(second, found) if found else all(part in words() for part in name.split("."))


@cache
def routes() -> frozenset[str]:
    """The paths of the application, with NAME in the place of parameters."""
    paths = build_app(fake_catalog(Path("none"))).openapi()["paths"]
    return frozenset(re.sub(r"\{[^}]*\}", "NAME", path) for path in paths) | {"/docs", "/redoc", "/openapi.json", "/metrics/haproxy", "/"}


@cache
def targets() -> frozenset[str]:
    """Of the Makefile, with % as it is there."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(word for line in re.findall(r"^([\w./%$()-][^:=\n\t]*):(?!=)", makefile, re.MULTILINE) for word in line.split())


def has_target(name: str) -> bool:
    return any(re.fullmatch(re.escape(target).replace("%", ".+"), name) for target in targets())


@cache
def help_text(*command: str) -> str:
    """AssertionError if it has no help, as a command that does not exist."""
    asked = [sys.executable, "-m", *command, "--help"]
    env = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 0, f"{' '.join(command)} --help: {done.stderr}"
    return done.stdout


def flags(*command: str) -> frozenset[str]:
    """The flags that a command's help lists."""
    return frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text(*command)))


def described(file: Path) -> list[str]:
    """The docstrings and comments of a Python file; of another file, the comments."""
    if file.suffix != ".py":
        return re.findall(r"(?:^|\s)#.*", file.read_text(encoding="utf-8"))
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    with file.open("rb") as opened:
        found += [token.string for token in tokenize.tokenize(opened.readline) if token.type == tokenize.COMMENT]
    return found
