"""What an exporter of one kind of model provides; `export.bundle` calls it, step by step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer

from export import contract
from export.errors import ExportError
from export.graphs.torch_graph import TorchGraph
from models.decoder.model import Decoder
from models.encoder.model import Encoder
from models.folders.folder import Settings, read_tokenizer

ABOUT_FP16 = "weights in float16, for a GPU: a CPU widens them to float32 and is not faster"

Progress = Callable[[str, float | None], None]
Files = dict[str, Path]  # graphs, by the names of their files in the bundle


@dataclass(frozen=True)
class Options:
    """What the caller of an export may choose; see `export.bundle.export_bundle`."""

    precision: contract.Precision = "fp32"
    attention: str = "softmax"
    min_cosine: float = 0.99
    held_out: Path | None = None
    maps: bool = False


@dataclass(frozen=True)
class Bar:
    """How far from the fp32 torch model a graph may be. Tolerances are relative to the largest value of a tensor where that is above 1."""

    tolerance: float  # of every output at every size
    logit_error: float  # of every golden logit, at export and on the processor of a server
    min_cosine: float = -1.0  # of every golden text
    lost_bits: float = 0.05  # share by which a decoder's bits per byte may rise over those of fp32


class Exporter(ABC):
    """One checkpoint that becomes a bundle.

    The constructor loads it and raises CheckpointError for what it cannot read, ExportError for options that are not for its kind. The
    methods are in the order of their calls, and raise ExportError.
    """

    architectures: ClassVar[Collection[str]]  # names in config.json
    source: Any  # the loaded checkpoint
    kind: contract.Kind
    max_tokens: int
    vocab_size: int

    def __init__(self, checkpoint: Path, settings: Settings | None, options: Options) -> None:
        """`settings` are those of config.json in the folder itself; None: it has none there."""
        self.checkpoint, self.settings, self.options = checkpoint, settings, options

    @abstractmethod
    def map_model(self) -> Encoder | Decoder:
        """The model whose attention maps can be computed. Raises ExportError if there are none."""

    @abstractmethod
    def prepare(self) -> None:
        """Refuse a checkpoint that cannot be served, before the slow steps."""

    @property
    @abstractmethod
    def graphs(self) -> Mapping[str, TorchGraph]:
        """The model's graphs by the names of their files in the bundle."""

    @abstractmethod
    def trace(self, scratch: Path) -> Files:
        """Write the fp32 graphs to `scratch` as torch exports them."""

    @abstractmethod
    def check(self, files: Files, precision: contract.Precision, progress: Progress) -> contract.Parity:
        """Compare optimised graphs, whose inputs and outputs were checked, with torch."""

    def lower(self, files: Files, scratch: Path, progress: Progress) -> Files:
        """Graphs of `options.precision`, made of the optimised fp32 graphs or of the model, ready to be served."""
        raise NotImplementedError

    @abstractmethod
    def golden(self) -> contract.Part:
        """The examples that a server checks at start."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, without padding and truncation. Raises ExportError if it has more tokens than the model."""
        tokenizer: Tokenizer = read_tokenizer(self.source.tokenizer_file)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if (size := tokenizer.get_vocab_size()) > self.vocab_size:
            raise ExportError(f"{self.source.tokenizer_file} has {size} tokens, and the model {self.vocab_size}: they are not of one kind")
        return tokenizer

    def copied(self) -> tuple[Path, ...]:
        """Files of the checkpoint that go into the bundle as they are."""
        return (self.source.tokenizer_file,)

    @abstractmethod
    def optimisation(self) -> str:
        """What was done to the graphs, in words."""

    @abstractmethod
    def fields(self, described: dict[str, contract.Graph]) -> dict[str, Any]:
        """The manifest's fields that differ between kinds. `described` are the written graphs by file name."""

    def origin(self, weights_sha256: str, attention: str, *, untrained: bool = False) -> contract.Source:
        """The manifest's entry for the checkpoint; `attention` names its layers."""
        return contract.Source(
            architecture=self.source.architecture,
            checkpoint=self.source.folder.resolve().name,
            weights_sha256=weights_sha256,
            attention=attention,
            untrained=untrained,
        )
