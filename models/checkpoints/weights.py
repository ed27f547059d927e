"""Copies the tensors of a checkpoint into a model by name. Missing and unexpected tensors are errors."""

import torch
from torch import Tensor

from models.checkpoints.families.family import Family, MaskedHead, Names
from models.encoder.heads import Headed
from models.folders.folder import CheckpointError

BUFFERS = ("position_ids", "token_type_ids", "inv_freq")  # constants that older releases of transformers saved with the weights
SHOWN = 5  # largest number of names in an error message


def fill(model: Headed, tensors: dict[str, Tensor], family: Family, head_names: Names, *, with_masked_head: bool = False) -> None:
    """Copy the tensors of a checkpoint into `model`, cast to the model's dtype. `head_names` maps the names of the head's modules in the
    checkpoint to those in `model`.

    Raises CheckpointError if a tensor is missing, is unexpected (neither needed nor listed in `Family.unused`) or has a wrong shape.
    """
    tensors = {_modern(name): tensor for name, tensor in tensors.items()}
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
    tensors |= {prefix + name: tensors[prefix + name][n:] for name, n in family.unread_rows.items() if prefix + name in tensors}
    names = {**_encoder_names(family, prefix, tensors), **head_names}
    if with_masked_head and family.masked_head is not None:
        _complete_decoder(family.masked_head, names, tensors)
    # The tensors of `places` share memory with the model. A SentenceEncoder's dense layers and heads are left out, because they are already
    # loaded from their own files. Buffers are left out, because the layers compute them.
    loaded = ("dense.", "multivector.", *(() if with_masked_head else ("sparse.",)))
    parameters = {name for name, _ in model.named_parameters() if not name.startswith(loaded)}
    places = {name: tensor for name, tensor in model.state_dict().items() if name in parameters}
    sources = _sources(names, places, n_layers=model.encoder.config.n_layers)
    check_names(sources, tensors, harmless=tuple(prefix + beginning for beginning in family.unused) + family.unused)
    for theirs, ours in sources.items():
        copy_rows(tensors[theirs], [places[name] for name in ours], theirs)


def _modern(name: str) -> str:
    """Return the current name of a tensor. Older checkpoints use TensorFlow's names gamma and beta for a norm's weight and bias."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _complete_decoder(head: MaskedHead, names: Names, tensors: dict[str, Tensor]) -> None:
    """Add the tensors of the decoder that a file leaves out, because they are elsewhere in it too."""
    (table,) = (theirs for theirs, ours in names.items() if ours == ("encoder.embeddings.tokens",))
    for name, same in ((f"{head.decoder}.weight", f"{table}.weight"), (f"{head.decoder}.bias", head.bias)):
        if name not in tensors and same in tensors:
            tensors[name] = tensors[same]


def _encoder_names(family: Family, prefix: str, tensors: dict[str, Tensor]) -> Names:
    """Choose the family's naming scheme that matches the most tensors in the file. Return it as a map from module names in the
    checkpoint to module names in the model.
    """
    spellings = [{prefix + theirs: ours for theirs, ours in names.items()} for names in family.encoder_names]
    best = max(spellings, key=lambda names: sum(_numbered(f"{theirs}.weight", 0) in tensors for theirs in names))
    return {theirs: tuple(f"encoder.{part}" for part in _parts(ours)) for theirs, ours in best.items()}


def _sources(names: Names, places: dict[str, Tensor], *, n_layers: int) -> dict[str, list[str]]:
    """Map the name of each tensor in the file to the names of the model's tensors among which its rows are split. The map has the
    weights and biases of all layers.

    Tensors that the model does not have are left out, such as a disabled bias or the norm before the first layer.
    """
    sources = {}
    for theirs, ours in names.items():
        for i in range(n_layers) if "{i}" in theirs else (0,):
            for kind in ("weight", "bias"):
                wanted = [_numbered(f"{part}.{kind}", i) for part in _parts(ours)]
                sources[_numbered(f"{theirs}.{kind}", i)] = [name for name in wanted if name in places]
    placed = {name for wanted in sources.values() for name in wanted}
    assert placed == set(places), f"no name in the checkpoint for {set(places) - placed}"
    return {theirs: wanted for theirs, wanted in sources.items() if wanted}


def check_names(sources: dict[str, list[str]], tensors: dict[str, Tensor], *, harmless: tuple[str, ...]) -> None:
    """Raise CheckpointError if the checkpoint's `tensors` lack a name in `sources`, which lists all that the model needs. Raise it also
    for a tensor that is not in `sources`, unless its name begins with a prefix in `harmless` or ends in a name in BUFFERS.
    """
    missing = [name for name in sources if name not in tensors]
    if missing:
        raise CheckpointError(f"{_listed(missing)} missing from the weights, which do not fit config.json; copy both again")
    left = [name for name in tensors if name not in sources]
    unexpected = [name for name in left if not name.startswith(harmless) and name.split(".")[-1] not in BUFFERS]
    if unexpected:
        raise CheckpointError(
            f"{_listed(unexpected)} unexpected in the weights of this architecture and would be ignored; "
            "check `architectures` in config.json, or use another checkpoint"
        )


def copy_rows(tensor: Tensor, places: list[Tensor], name: str) -> None:
    """Split the rows of `tensor` among the model's tensors `places`, in order, and copy them. Raises CheckpointError, with `name`, if
    the shapes do not match.
    """
    rows = [place.shape[0] for place in places]
    wanted = (sum(rows), *places[0].shape[1:])
    if tuple(tensor.shape) != wanted:
        raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, but config.json makes it {wanted}; copy both again")
    for place, part in zip(places, torch.split(tensor, rows), strict=True):
        place.copy_(part)


def _parts(ours: str | tuple[str, ...]) -> tuple[str, ...]:
    return (ours,) if isinstance(ours, str) else ours


def _numbered(name: str, i: int) -> str:
    return name.replace("{i}", str(i))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(sorted(names)[:SHOWN])}{more} {'is' if len(names) == 1 else 'are'}"
