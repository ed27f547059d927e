"""Tensors of a checkpoint find their places in a model: by name, each exactly once, with nothing missing and nothing left over."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models.families.family import Family, Names
from models.folder import CheckpointError

BUFFERS = ("position_ids", "token_type_ids", "inv_freq")  # constants that older releases saved among the weights
SHOWN = 5  # names in an error message


def fill(model: nn.Module, tensors: dict[str, Tensor], family: Family, head_names: Names) -> None:
    """Copy `tensors` into `model`, whose encoder is `model.encoder`. They are cast to the model's dtype.

    Raises CheckpointError for a missing tensor, an unexpected one (see `Family.unused`), and one of another shape.
    """
    tensors = {_modern(name): tensor for name, tensor in tensors.items()}
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
    spelling = max(family.encoder_names, key=lambda names: sum(_first(prefix + name) in tensors for name in names))
    ours_of = {prefix + theirs: _in_encoder(ours) for theirs, ours in spelling.items()} | head_names
    # Memory shared with the model. A SentenceEncoder's dense layers have files of their own, and are full when they come here.
    places = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("dense.")}
    filled: set[str] = set()
    used: set[str] = set()
    missing: list[str] = []
    for theirs, ours in _spelled_out(ours_of, n_layers=model.encoder.config.n_layers):
        wanted = [name for name in ours if name in places]
        if not wanted:
            continue  # our model has no such part: a bias switched off, no norm in front of the first layer
        if theirs not in tensors:
            missing.append(theirs)
            continue
        _copy(tensors[theirs], [places[name] for name in wanted], theirs)
        filled.update(wanted)
        used.add(theirs)
    if missing:
        raise CheckpointError(f"{_listed(missing)} missing from the weights; they do not fit config.json, copy both again")
    assert filled == set(places), f"no name in the checkpoint for {set(places) - filled}"
    unexpected = [name for name in tensors if name not in used and not _is_harmless(name, prefix, family)]
    if unexpected:
        raise CheckpointError(
            f"{_listed(unexpected)} unexpected in the weights of this architecture, and would be ignored; use another checkpoint"
        )


def _first(name: str) -> str:
    return f"{name}.weight".replace("{i}", "0")


def _modern(name: str) -> str:
    """The name that a tensor converted from TensorFlow would have today."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _in_encoder(ours: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"encoder.{name}" for name in ([ours] if isinstance(ours, str) else ours))


def _spelled_out(names: Names, *, n_layers: int) -> Iterator[tuple[str, list[str]]]:
    """("layer.{i}.dense", "blocks.{i}.up") -> ("layer.0.dense.weight", ["blocks.0.up.weight"]), the same with bias, and so on."""
    for theirs, ours in names.items():
        parts = [ours] if isinstance(ours, str) else ours
        for i in range(n_layers) if "{i}" in theirs else (0,):
            for kind in ("weight", "bias"):
                yield f"{theirs}.{kind}".replace("{i}", str(i)), [f"{part}.{kind}".replace("{i}", str(i)) for part in parts]


def _copy(tensor: Tensor, places: list[Tensor], name: str) -> None:
    """Fill the places with the rows of the tensor, one after the other."""
    rows = [place.shape[0] for place in places]
    wanted = (sum(rows), *places[0].shape[1:])
    if tuple(tensor.shape) != wanted:
        raise CheckpointError(f"{name} has the shape {tuple(tensor.shape)}, but config.json makes it {wanted}; copy both again")
    for place, part in zip(places, torch.split(tensor, rows), strict=True):
        place.copy_(part)


def _is_harmless(name: str, prefix: str, family: Family) -> bool:
    return name.split(".")[-1] in BUFFERS or name.removeprefix(prefix).startswith(family.unused)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(sorted(names)[:SHOWN])}{more} {'is' if len(names) == 1 else 'are'}"
