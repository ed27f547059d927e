"""The description of a family of published decoders: its settings, and the source of each of our tensors in its files."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from models.decoder.model import DecoderConfig
from models.folders.folder import Settings


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, and the tensors of `Decoder` that are its rows, one after the other, once `read` has been applied."""

    theirs: str
    ours: tuple[str, ...]
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """One way of writing down a decoder. `decoder_config` raises CheckpointError or ValueError for unsupported settings."""

    decoder_config: Callable[[Settings], DecoderConfig]
    sources: Callable[[DecoderConfig], list[Source]]  # every tensor of the model, under the names of a text-only checkpoint
    prefix: str  # in front of all names but the unembedding's
    prefix_beside_vision: str  # the same if the decoder is part of a larger model
    unused: tuple[str, ...]  # beginnings of tensor names that may be left over
