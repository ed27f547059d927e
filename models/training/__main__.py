"""python -m models.training COMMAND: collects data, trains and distils. PyTorch is imported when a command runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from service.terminal import command_app, console, errors_printed, needing

app = command_app()
Out = Annotated[Path, typer.Option(help="Folder to write; an unfinished run there is resumed.", show_default=False)]
NewFolder = Annotated[Path, typer.Option(help="Folder to write.", show_default=False)]
Config = Annotated[Path, typer.Option(help="YAML file; see models/training/configs.", show_default=False)]
Data = Annotated[Path, typer.Option(help="Folder that `collect` wrote.", show_default=False)]
Teacher = Annotated[Path, typer.Option(help="Checkpoint folder or GGUF file of the teacher.", show_default=False)]
HELD_OUT = ("attrs", "click", "jsonschema", "networkx", "requests", "tenacity", "Werkzeug")


@app.command()
def collect(
    out: NewFolder,
    held_out: Annotated[
        list[str] | None, typer.Option(help=f"Package for evaluation only ({', '.join(HELD_OUT)}). May be given several times.")
    ] = None,
    max_mb: Annotated[float, typer.Option(help="Largest size of the training text, in 1,000,000 bytes.")] = 64,
    max_held_out_mb: Annotated[float, typer.Option(help="Largest size of the evaluation text.")] = 2,
) -> None:
    """Collect training text from the installed packages whose licences permit it."""
    with needing("train"):
        from models.training.collect import collect as run
    summary = run(out, held_out=held_out or HELD_OUT, max_mb=max_mb, max_held_out_mb=max_held_out_mb)
    table = Table("split", "packages", "files", "MB", title=str(out))
    for split, total in summary["totals"].items():
        n_packages = sum(package["split"] == split for package in summary["packages"])
        table.add_row(split, str(n_packages), f"{total['files']:,}", f"{total['bytes'] / 1e6:.1f}")
    console.print(table, f"{len(summary['refused'])} packages refused for their licence; all of it in {out / 'sources.json'}")


@app.command()
def digits(out: NewFolder) -> None:
    """Write scikit-learn's handwritten digits as texts, for a decoder that draws them."""
    with needing("train"):
        from models.training.pictures.digits import write_digits
    write_digits(out)


@app.command()
def train(config: Config, data: Data, out: Out) -> None:
    """Train a decoder and write it as a checkpoint with its model card. After Ctrl-C or a kill, the same command resumes the run."""
    with needing("train"):
        from models.training.start import train_decoder
    _end(train_decoder(config, data, out, console), out)


@app.command()
def number_words(config: Config, out: Out) -> None:
    """Train an encoder-decoder from number words to digits. After Ctrl-C or a kill, the same command resumes the run."""
    with needing("train"):
        from models.training.start import train_number_words
    _end(train_number_words(config, out, console), out)


def _end(finished: bool, out: Path) -> None:
    if not finished:
        raise typer.Exit(130)
    console.print(f"Export it: [bold]attnserve export --checkpoint {out} --out bundles/{out.resolve().name}[/bold]")


@app.command()
def distill(teacher: Teacher, config: Config, data: Data, out: Out) -> None:
    """Replace an encoder's attention, train it to give the same embeddings, and write the changes. The same command resumes a run."""
    with needing("train"):
        from models.training.config import read_config
        from models.training.distillation.config import DistillationConfig
        from models.training.distillation.task import distill as run
    if not run(teacher, data, out, read_config(config, DistillationConfig), console):
        raise typer.Exit(130)


@app.command()
def assemble(
    teacher: Teacher,
    delta: Annotated[Path, typer.Option(help="Folder with the difference to the teacher.", show_default=False)],
    out: NewFolder,
    softmax: Annotated[bool, typer.Option("--softmax", help="Encoders: write the teacher with the student's positions instead.")] = False,
) -> None:
    """Write a student as an ordinary checkpoint, from its teacher and its difference to the teacher."""
    with needing("export"):
        from models.training.distillation.decoder_delta import assemble_decoder
        from models.training.distillation.delta import assemble as assemble_encoder
        from models.training.distillation.delta import is_of_decoder
    if not is_of_decoder(delta):
        assemble_encoder(teacher, delta, out, softmax=softmax)
    elif softmax:
        raise typer.BadParameter(f"{delta} is the difference of a decoder; leave out --softmax")
    else:
        assemble_decoder(teacher, delta, out)


if __name__ == "__main__":
    with errors_printed():
        app()
