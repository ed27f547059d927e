"""The commands `attnserve states check`, `backup` and `rebuild`, which maintain a store of states."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()
states = typer.Typer(help="Look after a store of states.", no_args_is_help=True)
app.add_typer(states, name="states")


@app.callback()
def root() -> None:
    """Do nothing. Without this callback, typer would not treat the single group `states` as a subcommand."""


@states.callback()
def group() -> None:
    """Maintain a store of states."""


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


@states.command()
def backup(
    location: Annotated[str, typer.Option("--states", help="The store: a directory.")],
    to: Annotated[Path, typer.Option(help="The directory of the copy; that of an earlier backup gets what is new.")],
) -> None:
    """Copy a directory of states to another directory, as it is at one moment, while the service may be running. `--set states=DIRECTORY`
    serves the copy."""
    from service.settings import load
    from service.states.backup import backup as copied
    from service.terminal import console, errors_printed, progress_bar

    folder = Path(load({"states": location}).states)
    if not (folder / "states.sqlite3").is_file():
        raise typer.BadParameter(f"there is no store in {location}: it has no file states.sqlite3")
    if to.resolve() == folder.resolve():
        raise typer.BadParameter("the copy needs another directory than the store", param_hint="--to")
    with errors_printed(), progress_bar() as show:
        states, files = copied(folder, to, show)
    console.print(f"{states} states, {files} of their blobs as files", soft_wrap=True)


@states.command()
def rebuild(location: Annotated[str, typer.Option("--states", help="The store: a directory.")]) -> None:
    """Rebuild the index of a store in a directory, if its database is damaged, from the rows that SQLite can read.

    Stop the service first. The old database is copied to the folder `damaged`.
    """
    from service.settings import load
    from service.states.rebuilding import rebuild as rebuilt
    from service.terminal import console, errors_printed

    folder = Path(load({"states": location}).states)
    if not (folder / "states.sqlite3").is_file():
        raise typer.BadParameter(f"there is no store in {location}: it has no file states.sqlite3")
    with errors_printed():
        made = rebuilt(folder)
    console.print(
        f"{made.states} states, {made.names} names, {made.documents} documents; {made.damaged} states have lost their bytes. "
        "Rows that could not be read are missing; a backup may have them.",
        soft_wrap=True,
    )
