"""The project's pages as data: their code blocks, links and the names that they give in backticks.

A block of `console` or `python` is executed by `test_blocks.py`, unless an HTML comment before it gives the reason against it:

    <!-- not run: needs a cluster -->

In a `console` block a line that begins with `$ ` is a command, `> ` or two spaces continue it, and other lines are its output, where `...`
matches any text. Comments after two spaces and `#` are no part of either.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXECUTED = ("console", "python")
SHOWN = ("", "json", "promql", "text", "yaml")
# Written by programs, which have tests of their own, or a record of the past: their names are not looked up.
WRITTEN = ("docs/compare.md", "docs/settings.md")
RECORDS = ("CHANGELOG.md", "docs/decisions.md")

_FENCE = re.compile(r"^(?P<mark>```+) *(?P<language>\w*)\s*$")
_REASON = re.compile(r"<!-- not run: (.+?) -->")
_COMMENT = re.compile(r"\s\s+# .*$| {2,}#$")


@dataclass(frozen=True)
class Block:
    """A fenced block. `not_run` is the reason why it is not executed, if there is one."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a `console` block and the output that the page shows for it."""

    text: str
    output: tuple[str, ...]


def pages() -> list[Path]:
    """All pages that people write for people. The cards beside trained weights are written by the training."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")]
    return sorted([*found, ROOT / "loadtest/README.md", ROOT / "models/pretrained/README.md"])


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    mark, language, start, body, reason = "", "", 0, [""], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if mark:
            if line.strip() == mark:
                found.append(Block(title(page), start, language, "".join(f"{each}\n" for each in body), reason))
                mark, reason = "", None
            else:
                body.append(line)
        elif fence := _FENCE.match(line):
            mark, language, start, body = fence["mark"], fence["language"], number, []
        elif line.strip():
            comment = _REASON.fullmatch(line.strip())
            reason = comment[1] if comment else None
    assert not mark, f"{title(page)}:{start}: a block without an end"
    return found


def prose(page: Path) -> str:
    """The page without its blocks and HTML comments."""
    lines, mark = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if mark:
            mark = "" if line.strip() == mark else mark
        elif fence := _FENCE.match(line):
            mark = fence["mark"]
        else:
            lines.append(line)
    return re.sub(r"<!--.*?-->", "", "\n".join(lines), flags=re.DOTALL)


def commands(block: Block) -> list[Command]:
    """The commands of a `console` block, each with the output that is shown. AssertionError for output without a command."""
    found: list[tuple[list[str], list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith(("$ ", "# ")):
            found.append(([line[2:]], []))
            continue
        assert found, f"{block.name}: {line!r} is before the first command; commands begin with '$ '"
        command, output = found[-1]
        if not output and (command[-1].endswith("\\") or line.startswith(("> ", "  "))):
            command.append(line.removeprefix("> "))
        else:
            output.append(_COMMENT.sub("", line))
    return [Command("\n".join(_COMMENT.sub("", each) for each in command), tuple(output)) for command, output in found]


def quoted(page: Path) -> list[str]:
    """The texts in backticks of the page's prose, in order, each once."""
    return list(dict.fromkeys(re.findall(r"`([^`\n]+)`", prose(page))))


def links(page: Path) -> list[tuple[str, str]]:
    """Links to files of the repository, as (path relative to the page, anchor or nothing)."""
    found = re.findall(r"\]\(([^()\s]+)\)", prose(page))
    return [(path, anchor) for path, _, anchor in (link.partition("#") for link in found) if "://" not in path]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
