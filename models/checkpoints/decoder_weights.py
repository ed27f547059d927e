"""Tensors of a published decoder find their places in `Decoder`: by name, each once, nothing missing and nothing left over."""

from torch import Tensor

from models.checkpoints.families.decoder_family import DecoderFamily
from models.checkpoints.weights import check_names, copy_rows
from models.decoder.model import Decoder


def fill_decoder(decoder: Decoder, tensors: dict[str, Tensor], family: DecoderFamily) -> None:
    """Copy `tensors` into `decoder`, cast to its dtype.

    Raises CheckpointError for a missing tensor, an unexpected one (see `DecoderFamily.unused`), and one of another shape.
    """
    beside_vision = any(name.startswith(family.prefix_beside_vision) for name in tensors)
    prefix = family.prefix_beside_vision if beside_vision else family.prefix
    sources = {}
    for source in family.sources(decoder.config):
        inside = source.theirs.startswith(family.prefix)
        sources[prefix + source.theirs.removeprefix(family.prefix) if inside else source.theirs] = source
    check_names({theirs: list(source.ours) for theirs, source in sources.items()}, tensors, harmless=family.unused)
    places = decoder.state_dict()  # memory shared with the decoder
    unplaced = places.keys() - {ours for source in sources.values() for ours in source.ours}
    assert unplaced == ({"unembedding.weight"} if decoder.config.tied else set()), f"no name in the checkpoint for {unplaced}"
    for theirs, source in sources.items():
        copy_rows(source.read(tensors[theirs]), [places[ours] for ours in source.ours], theirs)
