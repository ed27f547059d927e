"""Reads the Python source and documentation on this machine, from the standard library and the installed packages, file by file.

A package gives its `.py`, `.md` and `.rst` files and the README in its metadata. Files left out, each with a reason: bundled code
of other projects (it has its own licences), tests, files whose beginning names a copyleft licence, generated files, tables, and
files that are too short, too long or have too long lines. Copyright comments at the beginning of a file are removed.
"""

import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

from models.training.licences import Licence, licence_of

STANDARD_LIBRARY = "cpython"
SUFFIXES = (".py", ".md", ".rst")
CARRIED = {
    "_vendor",
    "_vendored",
    "vendor",
    "vendored",
    "thirdparty",
    "third_party",
    "thirdparty_files",
    "extern",
    "externals",
    "_distutils",
}
TESTS = {"test", "tests", "testing", "idle_test", "test_data", "baseline_images", "conftest.py"}
TABLES = {"encodings", "pydoc_data", "locale", "locales", "unicode"}  # folders of Python files that only contain data
SIZE_BYTES = (200, 200_000)
MEAN_LINE = 100  # characters, at most; minified files and embedded data have longer lines
DIGITS = 0.15  # of all characters, at most; code has 1 to 3 %, tables of numbers far more
HEAD = 2_000  # characters at the beginning that are searched for licences and notes that the file is generated
GENERATED = re.compile(
    r"auto-?generated|automatically generated|generated (by|from|automatically|with)|do not edit|machine.generated", re.IGNORECASE
)
COPYLEFT = re.compile(r"\b[AL]?GPL|General Public License|Mozilla Public License|\bMPL\b|ShareAlike|Share Alike|CC.BY.SA")
ABOUT_RIGHTS = re.compile(r"copyright|licen[sc]e|all rights reserved", re.IGNORECASE)
LEADING_COMMENTS = re.compile(r"\A(?:[ \t]*#[^\n]*\n|[ \t]*\n)+")


@dataclass(frozen=True, kw_only=True)
class Package:
    name: str
    version: str
    licence: Licence
    files: tuple[tuple[str, Path], ...]  # (displayed name, path)
    readme: str = ""


def packages() -> list[Package]:
    """Return the standard library, then each installed distribution once, sorted by name, whatever its licence."""
    found: dict[str, Package] = {}
    for distribution in distributions():
        package = _package(distribution)
        found.setdefault(package.name.lower(), package)
    return [_standard_library(), *(found[name] for name in sorted(found))]


def texts(package: Package) -> Iterator[tuple[str, str | None, str]]:
    """Yield (file, text, "") for each file to use, and (file, None, reason) for each file that is left out."""
    for name, file in package.files:
        reason = _wrong_place(name)
        if reason is None:
            try:
                text = file.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError):
                reason = "not readable as UTF-8"
            else:
                reason, text = _judge(text)
        yield (name, None, reason) if reason else (name, text, "")
    if package.readme:
        reason, text = _judge(package.readme)
        yield ("README (metadata)", None, reason) if reason else ("README (metadata)", text, "")


def _judge(text: str) -> tuple[str | None, str]:
    """Return the reason to leave the text out, or None, and the text with Unix line ends and without copyright comments."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    head = text[:HEAD]
    if COPYLEFT.search(head):
        return "names a copyleft licence", text
    if GENERATED.search(head):
        return "generated", text
    text = without_rights(text)
    size_bytes = len(text.encode())
    if not SIZE_BYTES[0] <= size_bytes <= SIZE_BYTES[1]:
        return ("too short" if size_bytes < SIZE_BYTES[0] else "too long"), text
    if len(text) > MEAN_LINE * (text.count("\n") + 1):
        return "wide lines", text
    if sum(character.isdigit() for character in text) > DIGITS * len(text):
        return "a table", text
    return None, text


def without_rights(text: str) -> str:
    """Return the text without its leading comments, a `#!` line included, if they mention copyright or a licence."""
    head = LEADING_COMMENTS.match(text)
    return text[head.end() :] if head and ABOUT_RIGHTS.search(head.group()) else text


def _wrong_place(name: str) -> str | None:
    parts = {part.lower() for part in PurePosixPath(name).parts}
    if parts & CARRIED:
        return "carried along from elsewhere"
    if parts & TESTS or PurePosixPath(name).name.startswith("test_"):
        return "tests"
    return "a table" if parts & TABLES else None


def _package(distribution: Distribution) -> Package:
    metadata = distribution.metadata
    listed = [file for file in distribution.files or [] if file.suffix in SUFFIXES and ".." not in file.parts]
    return Package(
        name=metadata["Name"],
        version=distribution.version,
        licence=licence_of(metadata),
        files=tuple((str(file), Path(str(file.locate()))) for file in sorted(listed, key=str)),
        readme=(metadata.get_all("Description") or [""])[0],
    )


def _standard_library() -> Package:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in root.rglob("*.py") if "site-packages" not in file.parts and file.is_file()]
    return Package(
        name=STANDARD_LIBRARY,
        version=platform.python_version(),
        licence=Licence(name="PSF-2.0", field="the licence of CPython", permissive=True),
        files=tuple((file.relative_to(root).as_posix(), file) for file in sorted(files)),
    )
