"""Exports encoders, rerankers and classifiers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from export import contract
from export.checks.golden import EncoderExamples, GoldenTokenizer
from export.checks.golden_texts import MORE_TEXTS, TEXTS
from export.checks.parity import (
    FP32_TOLERANCE,
    answers,
    check_batches,
    check_interface,
    compare,
    feeds,
    largest_error,
    open_graph,
    scale,
    shapes_of,
)
from export.errors import ExportError
from export.gpu.cpu_twin import write_cpu_twin
from export.gpu.kernels import check as check_kernels
from export.gpu.packed_encoder import HOW, gpu_encoder_graph, largest_value, pack_one
from export.graphs.encoder import encoder_graph, multivector_of, sparse_of, trace
from export.graphs.onnx_file import REWRITTEN, describe, optimise
from export.graphs.shared_weights import share
from export.graphs.torch_graph import TorchGraph
from export.int8.choice import TrialInputs, choose
from export.int8.recipes import RECIPES
from export.kinds.exporter import ABOUT_FP16, ErrorLimits, Exporter, Files, Options, Progress, finite
from models.checkpoints.own import weights_sha256
from models.checkpoints.published import ATTENTION_OF_CHECKPOINTS, SWAPPABLE, Checkpoint, load_checkpoint
from models.checkpoints.search import QUERY_TABLE
from models.checkpoints.static import without_special_tokens
from models.encoder.model import Encoder
from models.encoder.static import StaticShape
from models.folders.folder import JsonSettings

BARS: dict[contract.Precision, ErrorLimits] = {
    # onnxruntime sums in another order than torch, and a server's CPU in another order than the CPU that runs the export.
    "fp32": ErrorLimits(FP32_TOLERANCE, logit_error=1e-3, min_cosine=0.9999),
    # fp16 has 11 bits of precision instead of 24.
    "fp16": ErrorLimits(0.02, logit_error=0.02, min_cosine=0.999),
    # The limit is the caller's `min_cosine`: at random tokens, correct int8 graphs are far from torch.
    "int8": ErrorLimits(math.inf, logit_error=0.25, min_cosine=0.99),
}
PACKED = "tokens packed to (T, D) between attentions"


class EncoderExporter(Exporter):
    architectures = ()  # empty, because this exporter is used for every architecture that no other exporter lists

    def __init__(self, checkpoint: Path, settings: JsonSettings | None, options: Options) -> None:
        super().__init__(checkpoint, settings, options)
        if options.held_out is not None:
            raise ExportError(
                f"held_out={str(options.held_out)!r} is for decoders; leave it out, an encoder is checked by its golden texts"
            )
        if options.precision not in BARS:
            raise ExportError(f"precision={options.precision!r} is for decoders; an encoder has {', '.join(BARS)}")
        self.source = load_checkpoint(
            checkpoint, attention=options.attention, settings=settings, scratch=options.scratch, sparse=options.sparse
        )
        if options.gpu and (sparse_of(self.source) is not None or multivector_of(self.source) is not None):
            raise ExportError(f"{checkpoint} has sparse vectors or token matrices, which have no graph for GPUs; leave out --gpu")
        self.kind, self.max_tokens, self.vocab_size = self.source.kind, self.source.max_tokens, self.source.config.vocab_size
        self.traits = contract.KINDS[self.kind]
        self.packed = isinstance(self.source.model.encoder, Encoder)
        self.short = self.source.short_form() if options.precision != "fp16" else None  # in fp16, a GPU computes all texts by one graph
        self.trials: tuple[contract.RecipeTrial, ...] = ()
        if isinstance(self.source.config, StaticShape) and options.precision == "int8":
            raise ExportError("precision=int8 is for products of matrices, of which a static embedding has none; fp16 halves its table")

    def map_model(self) -> Encoder:
        source = self.source if self.short is None else self.short
        if not isinstance(encoder := source.model.encoder, Encoder):
            raise ExportError(f"{self.source.architecture} has no attention maps: its blocks are not those of an encoder")
        return encoder

    @property
    def map_tokens(self) -> int:
        return self.max_tokens if self.short is None else self.short.max_tokens

    def prepare(self) -> None:
        self.graphs  # noqa: B018  raises for an encoder without pooling
        self.short_examples  # noqa: B018  raises if the golden texts do not test both graphs

    @cached_property
    def graphs(self) -> dict[str, TorchGraph]:
        return {contract.GRAPH: encoder_graph(self.source)}

    @cached_property
    def examples(self) -> EncoderExamples:
        return self._examples(TEXTS)

    def _examples(self, texts: Sequence[str], graph: TorchGraph | None = None) -> EncoderExamples:
        """Return the texts as token ids, truncated to the longest input, with the outputs of `graph`, by default the served one."""
        graph = self.graphs[contract.GRAPH] if graph is None else graph
        tokens = GoldenTokenizer(self.source.tokenizer_file, self.max_tokens, special_tokens=self.source.adds_special_tokens)
        return EncoderExamples(self.kind, tokens, (graph.inputs, graph.outputs), graph.answer, texts)

    def trace(self, scratch: Path) -> Files:
        # Weights in a second file are memory-mapped at load, so that unused rows of the vocabulary need no memory.
        trace(self.source, scratch / "traced.onnx", weights_beside=True)
        return {contract.GRAPH: scratch / "traced.onnx"}

    def bar(self, precision: contract.Precision) -> ErrorLimits:
        return replace(BARS[precision], min_cosine=self.options.min_cosine) if precision == "int8" else BARS[precision]

    def check(self, files: Files, precision: contract.Precision, progress: Progress) -> contract.Parity:
        return self._check(files[contract.GRAPH], self.graphs[contract.GRAPH], self.examples, self.max_tokens, self.bar(precision))

    def _check(self, file: Path, graph: TorchGraph, examples: EncoderExamples, max_tokens: int, bar: ErrorLimits) -> contract.Parity:
        """Compare the graph in `file` with torch, at every size and for the examples."""
        session = open_graph(file)
        sizes = feeds(
            graph.inputs,
            vocab_size=self.vocab_size,
            pad_token_id=self.source.pad_token_id,
            max_tokens=max_tokens,
            unattended=contract.MULTIVECTOR in examples.compared,
        )
        error = compare(session, graph.answer, graph.outputs, sizes, tolerance=bar.tolerance)
        rows = examples.run(answers(session, graph.outputs))
        cosines = examples.cosines(rows)
        if not (worst := float(cosines.min())) >= bar.min_cosine:
            where = "" if self.traits.has_labels else f" at {examples.texts[cosines.argmin()]!r}"
            raise ExportError(f"the lowest cosine on the golden texts is {worst:.6f}{where}, and {bar.min_cosine} is needed")
        if self.traits.has_labels:
            largest_error(examples.logits(rows), examples.logits(examples.rows), bar.logit_error, "a logit of the golden texts is")
        heads = [name for name in examples.compared if name in (contract.SPARSE, contract.TOKEN_WEIGHTS, contract.MULTIVECTOR)]
        if heads and self.options.precision != "fp16":  # GPUs compute fp16, in other orders than a CPU
            check_batches(session, examples.feeds, heads, self.source.pad_token_id)
        return contract.Parity(max_abs_error=error, min_cosine=worst, shapes=shapes_of(sizes), tolerance=finite(bar.tolerance))

    def short_graph(self, folder: Path, scratch: Path) -> contract.ShortGraph | None:
        if self.short is None or self.short_examples is None:
            return None
        graph, file = encoder_graph(self.short), folder / contract.SHORT_GRAPH
        trace(self.short, scratch / contract.SHORT_GRAPH, weights_beside=True)
        optimised = optimise(scratch / contract.SHORT_GRAPH, scratch / "short")
        if self.options.precision == "int8":
            optimised = self._short_in_int8(self.short, optimised, scratch / "short-int8")
        share(optimised, folder / contract.GRAPH)
        optimised.rename(file)
        check_interface(open_graph(file), graph.inputs, graph.outputs)
        parity = self._check(file, graph, self.short_examples, self.short.max_tokens, self.bar(self.options.precision))
        return contract.ShortGraph(
            graph=describe(file, graph.inputs, graph.outputs, self.optimisation()),
            attention=self.short.config.attention,
            max_tokens=self.short.max_tokens,
            parity=parity,
        )

    @cached_property
    def short_examples(self) -> EncoderExamples | None:
        """The golden texts that the graph for short texts computes, with torch's outputs; None without that graph. Raises ExportError
        unless both graphs have golden texts, because a server's start would not test a graph without any.
        """
        if self.short is None:
            return None
        short, limit = self._short_of(self.examples), self.short.max_tokens
        if not 0 < len(short) < len(self.examples.texts):
            raise ExportError(
                f"{self.source.folder}: {len(short)} of {len(self.examples.texts)} golden texts have up to softmax_tokens={limit} tokens, "
                "but both graphs need some; remove softmax_tokens from its config.json"
            )
        return self._examples(short, encoder_graph(self.short))

    def _short_of(self, examples: EncoderExamples) -> list[str]:
        """Return those texts that the graph for short texts computes."""
        assert self.short is not None
        feeds = zip(examples.texts, examples.feeds, strict=True)
        return [text for text, feed in feeds if feed[contract.INPUT_IDS].size <= self.short.max_tokens]

    @cached_property
    def judged(self) -> EncoderExamples:
        """The texts whose vectors decide about int8."""
        return self._examples([*TEXTS, *MORE_TEXTS])

    @cached_property
    def calibration(self) -> EncoderExamples:
        """The texts by whose activations int8 products are smoothed."""
        return self._examples(MORE_TEXTS)

    def lower(self, files: Files, scratch: Path, progress: Progress) -> Files:
        if self.options.precision == "fp16":
            progress("fp16", None)
            return {contract.GRAPH: self._half(scratch / "fp16")}
        progress("int8", 0.0)
        task = self._trials(self.source, files[contract.GRAPH], self.judged, self.calibration, scratch)
        file, self.trials = choose(task, scratch, progress=lambda fraction: progress("int8", fraction))
        return {contract.GRAPH: file}

    def _trials(self, source: Checkpoint, fp32: Path, judged: EncoderExamples, calibration: EncoderExamples, scratch: Path) -> TrialInputs:
        """Return what the trials of int8 recipes need of a checkpoint, whose optimised graph is `fp32`."""
        trace(source, scratch / "separate.onnx", separate_projections=True)
        return TrialInputs(
            graph=scratch / "separate.onnx",
            fp32=fp32,
            judged=judged,
            calibration=calibration,
            outputs=self.graphs[contract.GRAPH].outputs,
            vocab_size=self.vocab_size,
            min_cosine=self.options.min_cosine,
        )

    def _short_in_int8(self, short: Checkpoint, fp32: Path, scratch: Path) -> Path:
        """Return the graph for short texts by the recipe that was kept for the other graph."""
        kept = [recipe for recipe in RECIPES if any(trial.kept and trial.recipe == recipe.name for trial in self.trials)]
        judged, calibration = (
            self._examples(self._short_of(examples), encoder_graph(short)) for examples in (self.judged, self.calibration)
        )
        scratch.mkdir()
        try:
            return choose(self._trials(short, fp32, judged, calibration, scratch), scratch, recipes=kept)[0]
        except ExportError as error:
            raise ExportError(f"the graph for texts of up to {short.max_tokens} tokens: {error}") from error

    def _half(self, folder: Path) -> Path:
        """Write the fp16 graph. It is not optimised, because onnxruntime would optimise it for this CPU and save casts to float32."""
        folder.mkdir()
        attention = self.source.config.attention if self.source.config.attention in SWAPPABLE else ATTENTION_OF_CHECKPOINTS
        half = load_checkpoint(
            self.checkpoint, attention=attention, dtype=torch.float16, settings=self.settings, sparse=self.options.sparse
        )
        trace(half, folder / contract.GRAPH)
        return folder / contract.GRAPH

    def gpu_graph(self, file: Path) -> contract.GpuGraph:
        half = load_checkpoint(self.checkpoint, attention=self.options.attention, dtype=torch.float16, settings=self.settings)
        graph = gpu_encoder_graph(half)
        pooling: contract.PoolingByWeights = getattr(half.model, "pooling")  # noqa: B009  checked by `gpu_encoder_graph`
        graph.export(file, weights_beside=True)
        check_kernels(file)
        write_cpu_twin(file, twin := file.with_name("twin.onnx"))
        packed, examples = answers(open_graph(twin), graph.outputs), self.examples
        twin.unlink()
        rows = examples.run(lambda feed: packed(pack_one(feed, graph.inputs, pooling)))
        worst, bar = float(examples.cosines(rows).min()), self.bar(self.options.precision)  # a server checks it by the same golden texts
        if not worst >= bar.min_cosine:
            raise ExportError(
                f"the lowest cosine of the graph for GPUs on the golden texts is {worst:.6f}, and {bar.min_cosine} is needed; "
                "with --precision fp16 less is"
            )
        if self.traits.has_labels:
            largest_error(examples.logits(rows), examples.logits(examples.rows), bar.logit_error, "a logit of the graph for GPUs is")
        largest = largest_value(self.source.model, lambda: [self.graphs[contract.GRAPH].answer(feed) for feed in examples.feeds])
        described = describe(file, graph.inputs, graph.outputs, HOW)
        return contract.GpuGraph(graph=described, pooling=pooling, min_cosine=worst, largest=largest)

    def golden(self) -> contract.Golden:
        bar, examples, rows = self.bar(self.options.precision), self.examples, self.examples.rows
        if (short := self.short_examples) is not None:
            of_short = dict(zip(short.texts, short.rows, strict=True))
            rows = [of_short.get(text, row) for text, row in zip(examples.texts, rows, strict=True)]
        bounds = {"min_cosine": bar.min_cosine}
        if self.traits.has_labels:
            bounds = {"max_abs_error": bar.logit_error * scale(examples.logits(rows))}
        return examples.golden(rows, sparse_of(self.source), **bounds)

    def copied(self) -> tuple[Path, ...]:
        tokenizer, table = super().copied() if self.source.adds_special_tokens else (), self.source.search.query_table
        if table is None:
            return tokenizer
        assert self.options.scratch is not None
        (file := self.options.scratch / QUERY_TABLE).write_bytes(table.numpy().astype("<f4").tobytes())
        return *tokenizer, file

    def texts(self) -> dict[str, str]:
        if self.source.adds_special_tokens:
            return {}
        return {contract.TOKENIZER: without_special_tokens(self.source.tokenizer_file)}

    def optimisation(self) -> str:
        done = [PACKED] if self.packed else []
        done.append(ABOUT_FP16 if self.options.precision == "fp16" else REWRITTEN)
        done += [f"products in 8-bit integers: {trial.recipe}" for trial in self.trials if trial.kept]
        return "; ".join(done)

    def fields(self, described: dict[str, contract.Graph]) -> dict[str, Any]:
        weights = self.source.weights_folder or self.source.tokenizer_file.parent
        names = ("pooling", "normalized", "pad_token_id", "prompts", "default_prompt", "id2label", "score_activation")
        return {
            "trials": self.trials,
            "sparse": sparse_of(self.source),
            "multivector": multivector_of(self.source),
            "roles": self.source.search.roles,
            "width": int(self.graphs[contract.GRAPH].outputs[0].shape[-1]),
            "source": self.origin(weights_sha256(weights), self.source.config.attention, untrained=self.source.untrained),
            **{name: getattr(self.source, name) for name in names},
        }
