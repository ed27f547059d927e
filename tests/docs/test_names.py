"""What the pages and the docstrings name exists: links, paths, modules, symbols, routes, make targets, commands, flags."""

import re
import shlex
from pathlib import Path

import pytest

from service.settings import PREFIX, STATES_PASSWORD, Settings
from tests.docs import names
from tests.docs.pages import RECORDS, ROOT, WRITTEN, anchors, blocks, commands, links, pages, quoted, title

READ = [page for page in pages() if title(page) not in (*RECORDS, *WRITTEN)]
# Flags, files, metrics and settings of other programs: Docker, kubectl, Locust, Linux, Ray.
FOREIGN = {
    "check_embedding_ctx_length",  # of LangChain
    *("--sbom=true", "--block", "--memory", "--previous", "--class-picker", "--web-host", "--shm-size"),
    *("memory.oom.group", "open_telemetry_metric_recorder.py", "ray_component_uss_mb", "max_surge_percent"),
    *("vllm/v1/metrics/loggers.py", "ray_serve_deployment_request_counter_total", "_total"),
}
SYSTEM = ("/tmp", "/dev", "/var", "/opt", "/mnt", "/models")  # of the machine or the image
GROUPS = ("states", "demo")  # commands of `attnserve` that have commands of their own
PROGRAMS = ("attnserve", "make", "python", "pytest")


def missing_of(text: str, page: Path) -> str | None:
    """What of this quotation, which is no command, does not exist, or None."""
    text = re.sub(r"KIND|NAME(?=\.)|DATE", "*", text)
    if text in FOREIGN or text.startswith(("OTEL_", "RAY_")) or re.split(r"[ =]", text)[0] in FOREIGN:
        return None
    if text.startswith("--"):
        flag = re.split(r"[ =]", text)[0]
        return None if f'"{flag}"' in names.source() or flag.removeprefix("--").replace("-", "_") in names.words() else flag
    if assigned := re.fullmatch(r"([A-Za-z_]\w*)=.*", text):
        return missing_of(assigned[1], page)
    if " " in text:
        return None
    if re.fullmatch(r"/[\w./{}*-]*", text):
        return None if route_like(text) or f'"{text}"' in names.source() or text.startswith(SYSTEM) else text
    if text.startswith(PREFIX):
        known = text in (f"{PREFIX}NAME", STATES_PASSWORD) or text.removeprefix(PREFIX).lower() in Settings.model_fields
        return None if known else text
    if names.FILE.fullmatch(text):
        known = names.has_file(text, page.parent) or (not text.endswith(".py") and text.rsplit("/", 1)[-1].lstrip("*") in names.source())
        return None if known else text
    if names.FOLDER.fullmatch(text):
        return None if names.has_folder(text.rstrip("/"), page.parent) else text
    if text.startswith(tuple(f"{package}." for package in names.PACKAGES)) and names.DOTTED.fullmatch(text):
        return None if names.has_module(text) or f'"{text}"' in names.source() else text
    if names.DOTTED.fullmatch(text):
        return None if names.has_symbol(text) or text in names.source() else text
    if re.fullmatch(r"[A-Za-z_]\w*(\(\))?", text):
        name = text.removesuffix("()").removesuffix("_total")  # Prometheus' ending of counters, and Ray's beginning of ours
        return None if {name, name.removeprefix("ray_"), name.removeprefix("ray_vllm_")} & names.words() else text
    return None if text in names.source() or all(word in names.words() for word in re.findall(r"[A-Za-z_]\w{2,}", text)) else text


def is_command(text: str) -> bool:
    return " " in text and text.split(maxsplit=1)[0].removeprefix(".venv/bin/") in PROGRAMS


def route_like(path: str) -> bool:
    """Of the application, with any words as its parameters, and `*` for any part; also `/models/NAME` before a route."""
    asked = path.removeprefix("/models/NAME").replace("*", "NAME")
    return any(re.fullmatch(re.escape(route).replace("NAME", "[^/]+"), asked) for route in names.routes())


def missing_of_command(text: str) -> str | None:
    """The make target, program, subcommand or flag of a command line that does not exist, or None."""
    try:
        parts = shlex.split(text, comments=True)
    except ValueError:
        return None
    for start, part in enumerate(parts):
        program = part.rsplit("/", 1)[-1].lstrip("$(")
        if program == "make" and begins(parts, start):
            asked = [each.rstrip(";") for each in until_end(parts[start + 1 :]) if "=" not in each and not each.startswith("-")]
            if wrong := [each for each in asked if re.fullmatch(r"[\w./-]+", each) and not names.has_target(each)]:
                return f"make {wrong[0]}"
        elif program == "attnserve" and begins(parts, start) and start + 1 < len(parts) and re.fullmatch(r"[a-z-]+", parts[start + 1]):
            named = 2 + (parts[start + 1] in GROUPS)  # such as `attnserve states check`
            return wrong_flag(("service.cli", *parts[start + 1 : start + named]), until_end(parts[start + named :]))
        elif part == "-m" and parts[start - 1].endswith(("python", "python3")) and parts[start + 1].split(".")[0] in names.PACKAGES:
            module = parts[start + 1]
            if not names.has_module(module):
                return module
            named = 2 + ((ROOT / module.replace(".", "/") / "__main__.py").exists())  # a package's commands, as `models.training train`
            return wrong_flag((module, *parts[start + 2 : start + named]), until_end(parts[start + named :]))
        elif program == "pytest":
            paths = [each for each in until_end(parts[start + 1 :]) if each.startswith("tests")]
            return next((each for each in paths if not (ROOT / each.split("::")[0]).exists()), None)
    return None


def begins(parts: list[str], at: int) -> bool:
    """Whether a command begins there."""
    return at == 0 or parts[at - 1].endswith(("&&", ";", "|", "do", "0", "1")) or parts[at].startswith("$(")


def until_end(parts: list[str]) -> list[str]:
    """Of this command alone."""
    ends = [at for at, part in enumerate(parts) if part in ("&&", "|", ";", ">", "<", "&") or part.endswith(";")]
    return parts[: ends[0] + 1 if ends and parts[ends[0]].endswith(";") and parts[ends[0]] != ";" else ends[0]] if ends else parts


def wrong_flag(command: tuple[str, ...], parts: list[str]) -> str | None:
    asked = [re.split(r"[=;)]", part)[0] for part in parts if re.match(r"--?[a-zA-Z]", part)]
    if not asked:
        return None if command[0] != "service.cli" or command[1] in subcommands() else f"attnserve {command[1]}"
    known = names.flags(*command)
    return next((f"{' '.join(command)} {flag}" for flag in asked if flag not in known), None)


def subcommands() -> str:
    """The help of `attnserve`, which lists them all."""
    return names.help_text("service.cli")


@pytest.mark.parametrize("page", READ, ids=title)
def test_what_a_page_names_exists(page: Path) -> None:
    missing = [found for text in quoted(page) if (found := missing_of(text, page))]
    assert missing == []


@pytest.mark.parametrize("page", pages(), ids=title)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    """In its text and its blocks, also of those that are not executed."""
    lines = [text for text in quoted(page) if page in READ and is_command(text)]
    lines += [command.text for block in blocks(page) if block.language == "console" for command in commands(block)]
    missing = [found for line in lines if (found := missing_of_command(line.replace("\\\n", " ").replace("\n", " ; ")))]
    assert missing == []


@pytest.mark.parametrize("page", pages(), ids=title)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []


def test_every_page_is_linked_from_another() -> None:
    """From README, possibly by way of others."""
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        new |= {(page.parent / path).resolve() for path, _ in links(page) if path.endswith(".md")} - reached
    assert {title(page) for page in pages()} <= {title(page) for page in reached if page.is_relative_to(ROOT)}


COMMENTED = [
    Path(name)
    for name in names.files()
    if name.endswith((".py", ".yaml", ".env", "Makefile", "Dockerfile", "pyproject.toml"))
    and not name.startswith(("tests/docs/", "deploy/chart/templates/", "models/pretrained/"))
]


def missing_of_comment(text: str, folder: Path) -> list[str]:
    """Of a docstring or comment: files and modules in backticks, pages and files of this repository, and symbols "in" a file."""
    named = [name for name in re.findall(r"`([^`\s]+)`", text) if names.FILE.fullmatch(name) and name.endswith(".py")]
    named += re.findall(rf"(?<![\w/.-])(?:{'|'.join((*names.PACKAGES, 'docs'))})/[\w./-]+\.(?:py|md|yaml|env)\b", text)
    missing = [name for name in named if name not in FOREIGN and not names.has_file(name, folder)]
    dotted = [name for name in re.findall(r"`([^`\s]+)`", text) if names.DOTTED.fullmatch(name) and not names.FILE.fullmatch(name)]
    packages = ("service.", "models.", "export.", "loadtest.")
    missing += [name for name in dotted if name.startswith(packages) and not names.has_module(name)]
    found = re.findall(r"`(\w+)` (?:in|of) `?((?:[\w-]+/)*[\w-]+\.py)\b", text)
    return missing + [f"{symbol} in {file}" for symbol, file in found if not names.has_word(symbol, names.called(Path(file).stem))]


@pytest.mark.parametrize("folder", sorted({file.parent for file in COMMENTED}), ids=str)
def test_what_docstrings_and_comments_name_exists(folder: Path) -> None:
    missing = []
    for file in (file for file in COMMENTED if file.parent == folder):
        for text in names.described(ROOT / file):
            missing += [f"{file}: {name}" for name in missing_of_comment(text, ROOT / folder)]
            if file.name == "__init__.py":
                folders = [name for name in re.findall(r"`([^`\s]+/)`", text) if names.FOLDER.fullmatch(name)]
                missing += [f"{file}: {name}" for name in folders if not names.has_folder(name.rstrip("/"), ROOT / folder)]
    assert missing == []


def test_the_makefile_and_pyproject_name_the_same_torch() -> None:
    (installed,) = re.findall(r"pip install torch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert set(re.findall(r"torch==([\d.]+)", (ROOT / "pyproject.toml").read_text())) == {installed}


@pytest.mark.parametrize(("page", "lines"), [("README.md", 160), ("ARCHITECTURE.md", 100), ("CONTRIBUTING.md", 100)])
def test_a_page_stays_short(page: str, lines: int) -> None:
    text = (ROOT / page).read_text().splitlines()
    assert len(text) < lines
    assert [line for line in text if len(line) > 120] == []


MIX = r"\n\| 6 to 220 words[^|]*\| (\d+) texts/s[^\n]*?(0\.\d+) \("


@pytest.mark.parametrize(
    ("said", "measured"),
    [
        (r"it answers (\d+) requests a second .* in 8 bits.*?That is (0\.\d+)", rf"\(all-MiniLM-L6-v2-int8\).*?{MIX}"),
        (r"in 8 bits, and (\d+) in fp32.*?That is 0\.\d+ and (0\.\d+)", rf"\(all-MiniLM-L6-v2, fp32\).*?{MIX}"),
        (r"infinity-emb answers (\d+) in fp32", r"6 to 220 words[^\n]*\n\| the same \|[^|]*\| infinity-emb: (\d+)"),
        (r"comes in ([\d.]+) ms instead of", r"\| HTTP: a state of 100 / 10,000 / 100,000 tokens[^|]*\| [\d.]+ / ([\d.]+) / "),
        (r"ms instead of (\d+) ms", r"\| HTTP: a prompt of 10,000 tokens fed again \| (\d+) ms"),
    ],
)
def test_a_figure_of_the_readme_is_that_of_the_page_of_figures(said: str, measured: str) -> None:
    found = [
        re.search(pattern, (ROOT / page).read_text(), re.DOTALL) for pattern, page in ((said, "README.md"), (measured, "docs/figures.md"))
    ]
    assert [None if match is None else match.groups() for match in found].count(None) == 0
    assert len({match.groups() for match in found if match}) == 1


def test_services_of_the_readme_run_beside_make_serve() -> None:
    """Each has a port of its own, so that the next command works while the first service runs."""
    lines = [command.text for block in blocks(ROOT / "README.md") if block.language == "console" for command in commands(block)]
    assert [line for line in lines if "attnserve serve" in line and "--port" not in line] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("service/nothing.py", True),
        ("nothing.py", True),
        ("service.http.nothing", True),
        ("Settings.no_such_setting", True),
        ("NothingLikeIt", True),
        ("/v1/nothing", True),
        ("service/settings.py", False),
        ("Settings.host", False),
        ("/v1/embeddings", False),
    ],
)
def test_what_does_not_exist_is_found(text: str, wrong: bool) -> None:
    assert (missing_of(text, ROOT / "README.md") is not None) == wrong
