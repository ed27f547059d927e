"""The description of a family of encoder checkpoints: how to read its settings, tensor names and heads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from models.encoder.model import EncoderConfig
from models.folders.folder import JsonSettings

# Maps the name of a module in the checkpoint to its name in our model. "{i}" stands for the layer's number. If the value is a tuple of
# names, the rows of the checkpoint's tensor are split among these modules, in this order.
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
    """The layers of a classifier between the encoder and the last linear layer: pooling, dense layer, activation, norm."""

    pooling: Literal["cls", "mean"] = "cls"
    activation: str = "tanh"
    bias: bool = True
    norm: bool = False  # True: the head has a norm like the encoder's, with the same eps and bias


@dataclass(frozen=True, kw_only=True)
class MaskedHead:
    """The head that predicts masked tokens: a dense layer, an activation, a norm and a linear layer to the vocabulary.

    The tensors have the full names `{transform}.weight`, `{norm}.weight`, `{decoder}.weight` and so on. A file without `{decoder}.weight`
    has it as the token embeddings, and one without `{decoder}.bias` has it as `bias`.
    """

    transform: str
    norm: str
    decoder: str
    bias: str
    activation: Callable[[JsonSettings], str] = lambda settings: settings.pick("hidden_act", "gelu", ACTIVATION_NAMES)

    @property
    def names(self) -> Names:
        return {self.transform: "sparse.transform.linear", self.norm: "sparse.transform.norm", self.decoder: "sparse.decoder"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A checkpoint format of encoders. Its functions raise CheckpointError for unsupported settings."""

    prefix: str  # what the encoder's tensor names begin with in a model with a head; in a bare encoder they have no prefix
    encoder_config: Callable[[JsonSettings], EncoderConfig]
    encoder_names: tuple[Names, ...]  # alternative naming schemes; the one that matches most tensors is used
    # Tensors whose names, with or without `prefix`, begin with one of these are ignored: poolers and language-modelling heads.
    unused: tuple[str, ...]
    sequence_head: Callable[[JsonSettings], HeadConfig] = lambda settings: HeadConfig()
    # Full names of the head's modules in the checkpoint -> names in SequenceClassifier.
    sequence_names: Names = field(default_factory=lambda: {"classifier.dense": "transform.linear", "classifier.out_proj": "classifier"})
    token_names: Names = field(default_factory=lambda: {"classifier": "classifier"})
    token_head: Callable[[JsonSettings], HeadConfig | None] = lambda settings: None
    masked_head: MaskedHead | None = None
    unread_rows: Mapping[str, int] = field(default_factory=dict)  # tensor name without `prefix` -> how many of its first rows are skipped
    pad_token_id: int = 0  # the padding id if config.json has none
    reads_token_types: bool = False  # whether token types distinguish the two texts of a pair
