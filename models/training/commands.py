"""Defines the commands `train` (a decoder) and `train-number-words` (an encoder-decoder). PyTorch is imported when a command runs, not
for its `--help`.
"""

from pathlib import Path
from typing import Annotated

import typer

from service.terminal import command_app, console, needing

app = command_app()


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML file; see models/training/configs.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Folder that `python -m models.training.collect` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Checkpoint folder to write; an unfinished run there is resumed.", show_default=False)],
) -> None:
    """Train a decoder and write it as a checkpoint with its model card. After Ctrl-C or a kill, the same command resumes the run."""
    with needing("train"):
        from models.training import start
    if not start.train_decoder(config, data, out, console):
        raise typer.Exit(130)
    console.print(f"Export it: [bold]attnserve export --checkpoint {out} --out bundles/{out.resolve().name}[/bold]")


@app.command()
def train_number_words(
    config: Annotated[Path, typer.Option(help="YAML file; see models/training/configs/number-words*.yaml.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Checkpoint folder to write; an unfinished run there is resumed.", show_default=False)],
) -> None:
    """Train an encoder-decoder from number words to digits. After Ctrl-C or a kill, the same command resumes the run."""
    with needing("train"):
        from models.training import start
    if not start.train_number_words(config, out, console):
        raise typer.Exit(130)
    console.print(f"Export it: [bold]attnserve export --checkpoint {out} --out bundles/{out.resolve().name}[/bold]")
