"""The description of a family of published decoders: how to read its settings, and which of its tensors fill which tensors of
`Decoder`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from models.decoder.model import DecoderConfig
from models.folders.folder import JsonSettings


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


def from_zero(weight: Tensor) -> Tensor:
    """Return 1 + weight, for published norms that multiply by 1 + weight, because ours multiply by the weight. The sum is computed in
    float32, since 1 + 0.002 is 1 in bfloat16.
    """
    return 1.0 + weight.float()


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor of a published checkpoint, with the name `theirs`. `read` converts it. Its rows are then split among the tensors of
    `Decoder` that `ours` names, in this order."""

    theirs: str
    ours: tuple[str, ...]
    read: Callable[[Tensor], Tensor] = unchanged


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """A checkpoint format of decoders. `decoder_config` raises CheckpointError or ValueError for unsupported settings."""

    decoder_config: Callable[[JsonSettings], DecoderConfig]
    sources: Callable[[DecoderConfig], list[PublishedTensor]]  # one entry for each tensor, named as in a text-only checkpoint
    prefix: str  # what all tensor names begin with, except the name of the unembedding
    unused: tuple[str, ...]  # prefixes of the names of tensors that are ignored
    # What the tensor names begin with, instead of `prefix`, if the checkpoint also has a vision encoder. None: the family has none.
    prefix_beside_vision: str | None = None
