"""The command line: every command with its help, where it is, and how its errors are printed."""

import ast
import builtins
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from service import cli
from service.errors import AttnserveError
from service.settings import Settings, default_of
from tests.imports import ROOT
from tests.service.fakes import PATIENCE_S

PACKAGES = ("models", "export", "service", "loadtest")
# Exceptions that are always caught within the package that raises them.
INTERNAL = {"TransferBroken", "ClientGone", "NoRanges", "ReplicaNotFound", "WrongOwner"}


def helped(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The help text of a command, from a process in which importing torch fails."""
    code = "import sys; sys.modules['torch'] = None; from service.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments, "--help"], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=False
    )


def test_help_lists_every_command_without_torch() -> None:
    done = helped()
    assert done.returncode == 0, done.stderr
    listed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("│ ") and line[2] not in " -"]
    assert listed == list(cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_shows_its_options_without_torch(command: str) -> None:
    done = helped(command)
    assert done.returncode == 0, done.stderr
    assert f" {command} [OPTIONS]" in done.stdout


def test_the_help_of_serve_names_the_default_limits() -> None:
    help_text = CliRunner().invoke(cli.app, ["serve", "--help"]).output
    limits = [name for name, field in Settings.model_fields.items() if name.startswith("max_") and field.default is not None]
    assert [name for name in limits if f"{name}={default_of(name)}" not in re.sub(r"\s+", "", help_text)] == []


@pytest.mark.parametrize("command", ["serve", "config"])
def test_the_help_of_a_flag_is_the_description_of_its_setting(command: str) -> None:
    group = get_command(cli.app)
    flags = {str(parameter.name): str(getattr(parameter, "help", None)) for parameter in group.commands[command].params}
    assert {"config", "set_"} <= set(flags)
    for name in set(flags) - {"config", "set_", "help"}:
        field = next(Settings.model_fields[each] for each in (name, f"{name}s", f"{name}es") if each in Settings.model_fields)
        assert flags[name].removesuffix(" May be given several times.") == field.description, name


def test_make_serve_answers_requests_for_any_model_name() -> None:
    """Clients send names such as "dummy" and "tgi"; an encoder and a decoder answer them."""
    command = ["make", "-n", "serve"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=True).stdout
    words = shlex.split(shown.replace("\\\n", "").splitlines()[-1])
    served = [Path(words[at + 1]).name for at, word in enumerate(words) if word == "--bundle"]
    (default,) = (word.removeprefix("default_model=").split(",") for word in words if word.startswith("default_model="))
    assert default == [served[0], served[-1]]


@pytest.mark.parametrize("error", [AttnserveError("no such [bundle]"), FileNotFoundError(2, "No such file", "bundle")])
def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_every_error_of_ours_has_the_one_base_class() -> None:
    """A class that derives from a built-in exception directly would end a command with a traceback."""
    known = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)}
    found = set()
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            bases = {base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)}
            if isinstance(node, ast.ClassDef) and bases & known and "AttnserveError" not in bases and not node.name.startswith("_"):
                found.add(node.name)
    assert found - {"AttnserveError"} == INTERNAL
