"""Every shell and Python block of the pages is executed, or the page gives the reason why not."""

import re

import pytest
from _pytest.mark import ParameterSet

from tests.docs.execution import SERVES, Checkout, agrees
from tests.docs.pages import EXECUTED, ROOT, SHOWN, Block, blocks, commands, pages

BLOCKS = [block for page in pages() for block in blocks(page)]
PROGRAMS = ("attnserve ", "make ", "python ", "pip ", "pytest ", "locust ", "curl ", "kubectl ", "docker ", ".venv/", "$ ")


def starts_a_service(block: Block) -> bool:
    return block.language == "console" and any(SERVES.match(command.text) for command in commands(block))


def asks_a_service(block: Block) -> bool:
    """Of another block, or of the page's reader: also a client in Python that is defined in another block."""
    return not starts_a_service(block) and (":8000" in block.text or "client." in block.text)


def parameters() -> list[ParameterSet]:
    def marks(block: Block) -> list[pytest.MarkDecorator]:
        return [pytest.mark.live] if starts_a_service(block) or asks_a_service(block) else []

    return [pytest.param(block, id=block.name, marks=marks(block)) for block in BLOCKS if block.language in EXECUTED and not block.not_run]


@pytest.mark.parametrize("block", parameters())
def test_a_block_works(block: Block, checkout: Checkout, request: pytest.FixtureRequest) -> None:
    """Each command ends with status 0, and writes what the page shows."""
    outputs = checkout.execute(block, request.getfixturevalue("served").port if asks_a_service(block) else None)
    if block.language == "console":
        for command, written in zip(commands(block), outputs, strict=True):
            if shown := "\n".join(command.output):
                assert agrees(shown, written), f"{command.text}\nshown:   {shown}\nwritten: {written}"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_no_commands_hide_in_other_blocks(block: Block) -> None:
    """A block is of a language that is executed or of one that is only shown, and the latter has no commands."""
    assert block.language in (*EXECUTED, *SHOWN)
    if block.language in SHOWN:
        assert [line for line in block.text.splitlines() if line.startswith(PROGRAMS)] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run], ids=lambda block: block.name)
def test_a_reason_is_given_only_where_it_is_needed(block: Block) -> None:
    assert block.language in EXECUTED
    assert len(str(block.not_run)) >= 10
    assert [path for path in re.findall(r"\b(?:tests|deploy)/[\w./]*\w", str(block.not_run)) if not (ROOT / path).exists()] == []
