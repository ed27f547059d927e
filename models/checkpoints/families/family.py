"""The description of a family of checkpoints: its settings, the names of its tensors, and its heads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from models.encoder.model import EncoderConfig
from models.folders.folder import Settings

# Checkpoint module -> our module; "{i}" runs over the layers. A tuple: the rows of these stand in one tensor of the
# checkpoint, one after the other.
Names = Mapping[str, str | tuple[str, ...]]

ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The parts of a classifier between encoder and last linear layer: pooling, dense layer, activation, norm."""

    pooling: Literal["cls", "mean"] = "cls"
    activation: str = "tanh"
    bias: bool = True
    norm: bool = False  # with the eps and bias of the encoder's norms


@dataclass(frozen=True, kw_only=True)
class Family:
    """One way of writing down an encoder. Its functions raise CheckpointError for unsupported settings."""

    prefix: str  # in front of the encoder's tensors in a model with a head, absent in a bare encoder
    encoder_config: Callable[[Settings], EncoderConfig]
    encoder_names: tuple[Names, ...]  # the spellings there are; the one that fits best is taken
    sequence_head: Callable[[Settings], HeadConfig]
    sequence_names: Names  # names with their prefix, ours relative to SequenceClassifier
    token_names: Names
    # Beginnings of tensor names, after the prefix, that may be left over: poolers and language-modelling heads.
    unused: tuple[str, ...]
    token_head: Callable[[Settings], HeadConfig | None] = lambda settings: None
    unread_rows: Mapping[str, int] = field(default_factory=dict)  # tensor, without the prefix -> rows at its top that nothing reads
    pad_token_id: int = 0  # where config.json has none
    reads_token_types: bool = False  # its tokenizers number the texts of a pair
