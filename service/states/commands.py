"""The command `attnserve states`: looks after a store of states."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()
states = typer.Typer(help="Look after a store of states.", no_args_is_help=True)
app.add_typer(states, name="states")


@app.callback()
def root() -> None:
    """Without a command beside it, `states` would be no group of its own."""


@states.callback()
def group() -> None:
    """Look after a store of states."""


@states.command()
def check(location: Annotated[str, typer.Option("--states", help="The store: a directory, or a URL of Redis.")]) -> None:
    """Read every stored blob, compare its hash, and list the damaged ones. Changes nothing; the service may be running.

    Exits with status 1 if any is damaged. The service sets a damaged blob apart when it next reads it, and answers 410 for its states.
    """
    from service.settings import load
    from service.states.opening import open_engine
    from service.terminal import console

    location = load({"states": location}).states
    if "://" not in location and not Path(location, "states.sqlite3").is_file():
        raise typer.BadParameter(f"there is no store in {location}: it has no file states.sqlite3")
    engine, read, damaged = open_engine(location), 0, 0
    for blob in engine.blobs():
        read += 1
        if hashlib.sha256(blob.content).hexdigest() != blob.sha256:
            damaged += 1
            console.print(f"damaged: {blob.sha256}, {len(blob.content)} bytes, of {blob.states} states", soft_wrap=True)
    engine.close()
    console.print(f"{read} blobs read, {damaged} damaged")
    if damaged:
        raise typer.Exit(1)
