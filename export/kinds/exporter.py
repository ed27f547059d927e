"""The interface of an exporter for one kind of model. `export.bundle` calls its methods step by step."""

import math
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
from models.folders.folder import JsonSettings, read_tokenizer

ABOUT_FP16 = "weights in float16, for a GPU: a CPU widens them to float32 and is not faster"

Progress = Callable[[str, float | None], None]  # called with the name of a step and the fraction of it that is done, or None
Files = dict[str, Path]  # file name in the bundle -> path of the graph


@dataclass(frozen=True)
class Options:
    """The options of an export."""

    precision: contract.Precision = "fp32"
    attention: str = "softmax"  # mechanism of an encoder's layers
    min_cosine: float = 0.99  # lowest cosine of an int8 encoder to fp32 torch on a golden text
    held_out: Path | None = None  # text of a decoder's bits per byte; None: built-in passages
    maps: bool = False  # add the graph of attention maps
    gpu: bool = False  # add the graph for GPUs
    window: int | None = None  # how many tokens a decoder's softmax layers attend to
    gguf: Path | None = None  # the file from which the checkpoint was unpacked
    sparse: bool = False  # read a masked language model for sparse vectors, although its folder does not say so
    scratch: Path | None = None  # a temporary folder for files that are made while the checkpoint is loaded


@dataclass(frozen=True)
class ErrorLimits:
    """Limits of a graph's differences from the fp32 torch model. Errors are relative to a tensor's largest value if that is above 1."""

    tolerance: float  # largest allowed error of any output, at every size (B, N) that is compared; infinite: no limit
    logit_error: float  # largest allowed error of a golden logit, at export and at a server's start
    min_cosine: float = -1.0  # lowest allowed cosine between the outputs of the graph and of torch for a golden text
    lost_bits: float = 0.05  # largest allowed increase of a decoder's bits per byte over fp32, as a fraction


def finite(limit: float) -> float | None:
    """Return a limit as a manifest has it: None if it is infinite."""
    return limit if math.isfinite(limit) else None


class Exporter(ABC):
    """The export of one checkpoint as a bundle. The constructor loads the checkpoint; it raises CheckpointError, and ExportError for
    options that the kind does not support. The methods are in the order of their calls, and raise ExportError.
    """

    architectures: ClassVar[Collection[str]]  # values of `architectures` in config.json for which this exporter is used
    source: Any  # the loaded checkpoint
    kind: contract.Kind
    max_tokens: int
    vocab_size: int
    chat_template: str | None = None  # source of the chat template that the bundle will have

    def __init__(self, checkpoint: Path, settings: JsonSettings | None, options: Options) -> None:
        """Load `checkpoint`. `settings` is the content of its config.json, or None if its top level has none."""
        self.checkpoint, self.settings, self.options = checkpoint, settings, options

    @abstractmethod
    def map_model(self) -> Encoder | Decoder:
        """Return the model whose attention maps can be computed. Raises ExportError if its kind has no maps."""

    @abstractmethod
    def prepare(self) -> None:
        """Raise ExportError for a checkpoint that cannot be served, before the slow steps."""

    @property
    @abstractmethod
    def graphs(self) -> Mapping[str, TorchGraph]:
        """The model's graphs by the names of their files in the bundle."""

    @abstractmethod
    def trace(self, scratch: Path) -> Files:
        """Write the fp32 graphs to `scratch` as torch exports them."""

    @abstractmethod
    def check(self, files: Files, precision: contract.Precision, progress: Progress) -> contract.Parity:
        """Compare the outputs of the graphs with torch. Names and shapes of inputs and outputs have already been checked."""

    def lower(self, files: Files, scratch: Path, progress: Progress) -> Files:
        """Return the graphs in `options.precision`, made from the optimised fp32 graphs or from the model, ready to be served."""
        raise NotImplementedError

    @abstractmethod
    def golden(self) -> contract.ManifestPart:
        """Return the examples that a server checks at start."""

    def short_graph(self, folder: Path, scratch: Path) -> contract.ShortGraph | None:
        """Write the graph for short texts into `folder`, with the served graph's weights, compare it with torch, and return its
        description; or None.
        """
        return None

    @property
    def map_tokens(self) -> int:
        """The longest text that `map_model` computes, in tokens."""
        return self.max_tokens

    def gpu_graph(self, file: Path) -> contract.GpuGraph:
        """Write the graph for GPUs, in float16, compare it with torch, and return its description."""
        raise ExportError(f"a model of kind {self.kind} has no graph for GPUs; leave out --gpu")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, without padding and truncation. Raises ExportError if its vocabulary is larger than the model's."""
        tokenizer: Tokenizer = read_tokenizer(self.source.tokenizer_file)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if (size := tokenizer.get_vocab_size()) > self.vocab_size:
            raise ExportError(
                f"{self.source.tokenizer_file} has {size} tokens, but the model {self.vocab_size}: use the model's own tokenizer"
            )
        return tokenizer

    def copied(self) -> tuple[Path, ...]:
        """Return the files of the checkpoint that are copied into the bundle unchanged."""
        return (self.source.tokenizer_file,)

    def texts(self) -> dict[str, str]:
        """Return further text files of the bundle: name -> content."""
        return {}

    @abstractmethod
    def optimisation(self) -> str:
        """Describe the optimisation of the graphs, for the manifest."""

    @abstractmethod
    def fields(self, described: dict[str, contract.Graph]) -> dict[str, Any]:
        """Return the manifest's fields that differ between kinds. `described` maps file names to descriptions of the written graphs."""

    def origin(self, weights_sha256: str, attention: str, *, untrained: bool = False) -> contract.CheckpointSource:
        """Return the manifest's entry for the checkpoint; `attention` names the mechanism of its layers."""
        return contract.CheckpointSource(
            architecture=self.source.architecture,
            checkpoint=self.source.folder.resolve().name,
            weights_sha256=weights_sha256 if self.options.gguf is None else contract.sha256(self.options.gguf),
            attention=attention,
            untrained=untrained,
        )
