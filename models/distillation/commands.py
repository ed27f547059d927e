"""Defines the command `distill`. PyTorch is imported when the command runs, not for its `--help`."""

from pathlib import Path
from typing import Annotated

import typer

from service.terminal import command_app, console, needing, pairs

app = command_app()


@app.command()
def distill(
    teacher: Annotated[Path, typer.Option(help="Checkpoint folder of an encoder with softmax attention.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Folder that `python -m models.distillation.collect` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write; an unfinished run there is resumed.", show_default=False)],
    attention: Annotated[str, typer.Option(help="Attention that replaces softmax, a name in LAYERS.")] = "hybrid",
    option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the layer, such as block=64. May be given several times.")] = None,
    positions: Annotated[int, typer.Option(min=2, help="Longest input of the student, in tokens.")] = 8_192,
    transfer_steps: Annotated[int, typer.Option(min=0, help="Steps of the first phase, which trains each layer by itself.")] = 400,
    end_to_end_steps: Annotated[int, typer.Option(min=0, help="Steps of the second phase, which trains all layers together.")] = 400,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, padding included.")] = 4_096,
    shortest: Annotated[int, typer.Option(min=1, help="Shortest training text, in tokens. A hybrid learns only beyond 2 blocks.")] = 129,
    longest: Annotated[int, typer.Option(min=1, help="Tokens at which texts are cut.")] = 1_024,
    blocks_rate: Annotated[float, typer.Option(min=0, help="Learning rate of the teacher's own weights in the second phase.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Replace an encoder's attention, train it to give the same embeddings, and write the changes. The same command resumes a run."""
    with needing("train"):
        from models.distillation.config import DistillationConfig
        from models.distillation.task import distill as run
    options = {key: int(value) if value.lstrip("-").isdigit() else value for key, value in pairs(option, "--option").items()}
    try:
        config = DistillationConfig(
            attention=attention,
            options=options,
            n_positions=positions,
            transfer_steps=transfer_steps,
            end_to_end_steps=end_to_end_steps,
            tokens=tokens,
            shortest=shortest,
            longest=longest,
            end_rate=blocks_rate,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not run(teacher, data, out, config, console):
        raise typer.Exit(130)
