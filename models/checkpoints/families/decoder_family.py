"""The description of a family of published decoders: how to read its settings, and which of its tensors become which of ours."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from models.decoder.model import DecoderConfig
from models.folders.folder import JsonSettings


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor `theirs` of a checkpoint. `read` converts it, and its rows are then split among the tensors `ours` of
    `Decoder`."""

    theirs: str
    ours: tuple[str, ...]
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """A checkpoint format of decoders. `decoder_config` raises CheckpointError or ValueError for unsupported settings."""

    decoder_config: Callable[[JsonSettings], DecoderConfig]
    sources: Callable[[DecoderConfig], list[PublishedTensor]]  # one entry for each tensor, named as in a text-only checkpoint
    prefix: str  # the common beginning of all tensor names, except that of the unembedding
    prefix_beside_vision: str  # the beginning in place of `prefix` if the checkpoint also has a vision encoder
    unused: tuple[str, ...]  # prefixes of tensor names that are ignored
