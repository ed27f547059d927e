"""Exports decoders. Their graph must also give the same bits for any batch and any chunks of a prompt."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import onnx
import torch

from export import contract
from export.blocks.blocks import BLOCK, rounded
from export.blocks.graph import Choice, with_blocks
from export.blocks.integers import with_integer_products
from export.blocks.stored import StoredBlocks
from export.checks.answers import FIRST, Fp32Answers
from export.checks.bits_per_byte import HeldOutText, bits_per_byte, read_text
from export.checks.decoder_parity import TOLERANCE, Steps, Values, compare, inexact, sizes_within
from export.checks.full_attention import compare_within
from export.checks.golden import DecoderExamples, cosines
from export.checks.golden_texts import PASSAGES, QUESTIONS
from export.checks.parity import Feed, answers, largest_error, open_graph, scale
from export.errors import ExportError
from export.graphs.decoder_step import states_of, step_graph, trace
from export.graphs.onnx_file import REWRITTEN, save
from export.graphs.torch_graph import TorchGraph
from export.int8.recipes import column_peaks
from export.kinds.exporter import ABOUT_FP16, ErrorLimits, Exporter, Files, Options, Progress, finite
from models.attention.sparse.sink_window import SinkWindowAttention
from models.checkpoints.chat import CHAT_TEMPLATE
from models.checkpoints.decoder import ARCHITECTURE, load_decoder
from models.checkpoints.families import DECODERS
from models.checkpoints.published import UNLIMITED
from models.decoder.model import HYBRID, Decoder
from models.decoder.window import softmax_of, windowed
from models.folders.folder import JsonSettings
from models.layers import LAYERS
from service.errors import InvalidRequest
from service.generation.chat.template import ChatTemplate

FP32_LOGIT_ERROR = 1e-3
OPERATORS = "recurrences and short convolutions as operators of onnxruntime, for any number of tokens"
BARS: dict[contract.Precision, ErrorLimits] = {
    # onnxruntime sums in another order than torch, and a server's CPU in another order than the CPU that runs the export.
    "fp32": ErrorLimits(TOLERANCE, logit_error=FP32_LOGIT_ERROR),
    # fp16 has 11 bits of precision instead of 24, and states accumulate rounding errors.
    "fp16": ErrorLimits(0.05, logit_error=0.05),
    "as-stored": ErrorLimits(0.02, logit_error=0.01),  # the reference has the same weights; activations have about 15 bits
}
# Rounded weights and rough products may be far from torch at random tokens. Their limits are those of bits per byte and answers.
ROUNDED = ErrorLimits(math.inf, logit_error=math.inf)
# On a server's CPU, a golden logit may be this many times as far from torch as at export, because activations near a half round otherwise.
GOLDEN_MARGIN = 2.0
# The tolerances are those of at most this many layers, as rounding errors grow with the layers. In fp32 SmolLM2's 30 layers were 1.0e-4
# away from the same model in fp64, and 1.2e-4 from torch, at random tokens on a CPU with AVX-512.
LAYERS_OF_TOLERANCE = 12
HOW: dict[contract.Precision, str] = {
    "fp32": f"{OPERATORS}; {REWRITTEN}",
    "fp16": f"{OPERATORS}; {ABOUT_FP16}",
    "int8-rough": f"{OPERATORS}; {REWRITTEN}; products in 8-bit integers, a scale for each token",
}
WEIGHTS = {
    "int8": f"weights in 8 bits, a scale per {BLOCK}",
    "int4": f"weights in 4 bits, tables and the last product in 8, a scale per {BLOCK}",
    "as-stored": "weights in the blocks of the GGUF file",
}
ROUNDING: dict[str, Choice] = {"int8": partial(rounded, bits=8), "int4": partial(rounded, bits=4)}
# The largest weights with which products with a scale for each token are tried: CPUs without VNNI add two products in 16 bits, which
# 127 can overflow and 63 cannot. If both need more than LOST_BITS more bits per byte than fp32, int8-rough has blocks.
WEIGHT_LEVELS = (127, 63)
LOST_BITS = 0.02


def in_blocks(precision: contract.Precision) -> str:
    """Describe a graph whose weights are in blocks."""
    terms = "activations rounded to 8 bits" if precision.endswith(contract.ROUGH) else "activations in two terms of 8 bits"
    return f"{OPERATORS}; {REWRITTEN}; {WEIGHTS[precision.removesuffix(contract.ROUGH)]}; products in 8-bit integers (MatMulNBits), {terms}"


class DecoderExporter(Exporter):
    architectures = (ARCHITECTURE, *DECODERS)
    kind = "decoder"

    def __init__(self, checkpoint: Path, settings: JsonSettings | None, options: Options) -> None:
        super().__init__(checkpoint, settings, options)
        if options.attention != "softmax":
            raise ExportError(f"attention={options.attention!r} is for encoders; a decoder keeps the layers that it was trained with")
        precision = options.precision
        self.rough, self.weights = precision.endswith(contract.ROUGH), precision.removesuffix(contract.ROUGH)
        if self.weights == "as-stored" and options.gguf is None:
            raise ExportError(f"precision={precision!r} keeps the blocks of a GGUF file, and {checkpoint} is none; choose int8 or int4")
        self.source = load_decoder(checkpoint, settings=settings)
        self.chat_template = self.source.chat_template
        self.full: Decoder | None = None  # the model whose layers attend to all tokens
        if options.window is not None:
            self.full = self.source.model
            self.source = replace(self.source, **_windowed(self.full, options.window))
        elif HYBRID in self.source.config.layer_names:
            self.full = softmax_of(self.source.model)
        self.n_positions: int | None = self.source.config.n_positions
        self.max_tokens, self.vocab_size = self.n_positions or UNLIMITED, self.source.config.vocab_size
        self.exact = False
        self.how = HOW[precision] if precision in HOW else in_blocks(precision)
        self.bits: dict[contract.Precision, float] = {}  # precision -> bits per byte, for each precision that was checked
        self.answers: contract.Answers | None = None

    def map_model(self) -> Decoder:
        return self.source.model

    def prepare(self) -> None:
        source = self.source
        if source.model.grows:
            raise ExportError(f"{source.folder}: {_growing(source.config.layer_names)}")
        if uneven := [layer.n_slots for layer in self.windows if layer.n_slots % contract.SLOT_BLOCK]:
            raise ExportError(
                f"{source.folder}: {uneven[0]} slots, of window and piece, are no multiple of {contract.SLOT_BLOCK}: choose a "
                "window that is, such as 512, 1024 or 2048"
            )
        if source.config.positions == "rotary" and source.config.rotary.depends_on_length:
            raise ExportError(
                f"{source.folder}: the rotary scaling is dynamic, so a token's rotation depends on the length of its text, and a state "
                "would depend on how a prompt is cut; supported: linear, llama3, yarn, or no scaling"
            )
        if source.image is not None and self.n_positions is not None:
            longest = max(len(self.tokenizer.encode(prompt).ids) for prompt in source.image.prompts)
            # 1 is subtracted, because the last pixel is generated but never an input.
            if (needed := longest + source.image.n_pixels - 1) > self.n_positions:
                raise ExportError(
                    f"{source.folder}: a prompt and its pixels need {needed} positions, and the model has n_positions={self.n_positions}"
                )
        self.tokenizer, self.examples, self.text  # noqa: B018  computed now, so that an unreadable text raises before the slow steps

    @cached_property
    def text(self) -> HeldOutText:
        """Return the text on which bits per byte are measured."""
        return HeldOutText("the golden passages", PASSAGES) if self.options.held_out is None else read_text(self.options.held_out)

    @cached_property
    def graphs(self) -> dict[str, TorchGraph]:
        return {contract.GRAPH: step_graph(self.source.model)}

    @cached_property
    def reference(self) -> Steps:
        graph = self.graphs[contract.GRAPH]
        return Steps(graph.answer, graph.inputs, n_positions=self.n_positions, n_slots=self.n_slots)

    @property
    def windows(self) -> list[SinkWindowAttention]:
        """Return the layers that attend to a window and the first tokens."""
        return [block.layer for block in self.source.model.blocks if isinstance(block.layer, SinkWindowAttention)]

    @property
    def window(self) -> int | None:
        """Return up to how many tokens all layers are exact, or None without windows."""
        return min((layer.window for layer in self.windows), default=None)

    @property
    def n_slots(self) -> int | None:
        return max((layer.n_slots for layer in self.windows), default=None)

    def tolerance(self, precision: contract.Precision) -> float:
        return BARS.get(precision, ROUNDED).tolerance * max(1.0, len(self.source.model.blocks) / LAYERS_OF_TOLERANCE)

    @cached_property
    def examples(self) -> DecoderExamples:
        return DecoderExamples(self.tokenizer, self.reference)

    def trace(self, scratch: Path) -> Files:
        trace(self.source.model, scratch / "traced.onnx")
        return {contract.GRAPH: scratch / "traced.onnx"}

    def check(self, files: Files, precision: contract.Precision, progress: Progress) -> contract.Parity:
        bar, steps, examples = BARS.get(precision, ROUNDED), self._steps(files[contract.GRAPH], 0), self.examples
        error = compare(steps, self.reference, vocab_size=self.vocab_size, tolerance=self.tolerance(precision))
        rows = examples.run(steps)
        golden_error = largest_error(rows, examples.logits, bar.logit_error, "a logit of the golden prompts is")
        self.golden_limit = bar.logit_error * scale(examples.logits)
        if not math.isfinite(self.golden_limit):
            self.golden_limit = max(GOLDEN_MARGIN * golden_error, FP32_LOGIT_ERROR * scale(examples.logits))
        likeness = cosines(*(logits - logits.mean(axis=1, keepdims=True) for logits in (rows, examples.logits)))
        counts = contract.slot_counts(self.n_slots or 0)
        changed = inexact(lambda threads: self._steps(files[contract.GRAPH], threads), vocab_size=self.vocab_size, slot_counts=counts)
        self.exact, self.bits[precision] = changed is None, self._bits_per_byte(steps, partial(progress, "bits per byte"))
        if precision == "fp32" and not self.exact:
            raise ExportError(
                f"the graph is not exact: {changed}. A state would depend on how its prompt is cut and on the other rows of its batch"
            )
        if precision == "fp32" and self.full is not None and self.window is not None:
            progress("compare with full attention", None)
            compare_within(steps, self.full, self.window, self.source.config.vocab_size, FP32_LOGIT_ERROR)
        if self.bits[precision] > (most := self.bits["fp32"] * (1 + bar.lost_bits)) and precision != "fp32":
            raise ExportError(f"{precision} takes {self.bits[precision]:.3f} bits per byte; the limit is {most:.3f}. Keep fp32")
        self._compare_answers(steps, precision, progress)
        shapes = tuple(first for first, _ in sizes_within(self.n_positions))
        limit = finite(self.tolerance(precision))
        return contract.Parity(max_abs_error=error, min_cosine=float(likeness.min()), shapes=shapes, tolerance=limit)

    def _compare_answers(self, steps: Steps, precision: contract.Precision, progress: Progress) -> None:
        """Compare the answers of a lower precision with those of fp32. Raises ExportError if they miss their limits."""
        if self.options.precision == "fp32":
            return
        if precision == "fp32":
            self.fp32_answers = Fp32Answers(steps, self._prompts(), self.source.eos_token_ids, partial(progress, "answers in fp32"))
            return
        compared = partial(progress, f"answers in {precision}")
        self.answers = self.fp32_answers.compare(steps, self.vocab_size, limited=not self.rough, show=compared)
        if not self.answers.within_limits:
            closer = "as-stored or fp32" if self.options.gguf is not None and precision != "as-stored" else "fp32"
            rough = "" if precision == "fp16" else f", or accept these figures with --precision {precision}{contract.ROUGH}"
            raise ExportError(f"{precision} changes the answers of its weights: {self.answers.in_words}. Choose {closer}{rough}")

    def _prompts(self) -> list[list[int]]:
        """Return the prompts whose answers are compared, as token ids: questions in the chat template, or else the golden prompts."""
        if (source := self.source.chat_template) is None:
            return self.examples.token_ids
        bos, eos = self.source.bos_token_id, next(iter(self.source.eos_token_ids), None)
        bos_token, eos_token = ("" if at is None else str(self.tokenizer.id_to_token(at)) for at in (bos, eos))
        template = ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)
        try:
            texts = [template.render([{"role": "user", "content": question}]) for question in QUESTIONS]
        except InvalidRequest:  # some templates demand other messages, such as one of the system
            return self.examples.token_ids
        finally:
            template.close()
        prompts = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return [ids for ids in prompts if self.n_positions is None or len(ids) + FIRST <= self.n_positions] or self.examples.token_ids

    def _bits_per_byte(self, steps: Steps, show: Callable[[float], None]) -> float:
        ends = {"bos_token_id": self.source.bos_token_id, "eos_token_id": next(iter(self.source.eos_token_ids), None)}
        return bits_per_byte(steps, self.tokenizer, self.text, **ends, show=show)

    def _steps(self, file: Path, threads: int) -> Steps:
        graph = self.graphs[contract.GRAPH]
        return Steps(
            answers(open_graph(file, threads=threads), graph.outputs), graph.inputs, n_positions=self.n_positions, n_slots=self.n_slots
        )

    def lower(self, files: Files, scratch: Path, progress: Progress) -> Files:
        progress(self.options.precision, None)
        if self.options.precision == "int8-rough" and (found := self._with_integer_products(files[contract.GRAPH], scratch, progress)):
            return {contract.GRAPH: found}
        if self.weights in WEIGHTS:
            choose = StoredBlocks(self.options.gguf) if self.weights == "as-stored" and self.options.gguf else ROUNDING[self.weights]
            (scratch / "blocks").mkdir()
            made = with_blocks(onnx.load(files[contract.GRAPH]), choose, rough=self.rough)
            save(made, scratch / "blocks" / contract.GRAPH, weights_beside=True)
            return {contract.GRAPH: scratch / "blocks" / contract.GRAPH}
        # The fp16 graph is not optimised, because onnxruntime would optimise it for this machine's CPU and save casts to float32.
        (scratch / "fp16").mkdir()
        half = load_decoder(self.checkpoint, dtype=torch.float16, settings=self.settings)
        trace(half.model, scratch / "fp16" / contract.GRAPH)
        return {contract.GRAPH: scratch / "fp16" / contract.GRAPH}

    def _with_integer_products(self, fp32: Path, scratch: Path, progress: Progress) -> Path | None:
        """Return the graph with a scale for each token that has the fewest bits per byte, or None if it loses too much."""
        feeds: list[Feed] = []

        def seen(feed: Feed) -> Mapping[str, Values]:
            feeds.append({name: array.copy() for name, array in feed.items()})
            return steps.answer(feed)

        steps = self._steps(fp32, 0)
        self.examples.run(Steps(seen, self.graphs[contract.GRAPH].inputs, n_positions=self.n_positions, n_slots=self.n_slots))
        peaks, tried = column_peaks(onnx.load(fp32), feeds), dict[Path, float]()
        for levels in WEIGHT_LEVELS:
            (folder := scratch / f"integers-{levels}").mkdir()
            file = folder / contract.GRAPH
            save(with_integer_products(onnx.load(fp32), peaks, weight_levels=levels), file, weights_beside=True)
            tried[file] = self._bits_per_byte(self._steps(file, 0), partial(progress, f"int8, weights up to {levels}"))
        best = min(tried, key=lambda file: tried[file])
        if tried[best] <= self.bits["fp32"] * (1 + LOST_BITS):
            return best
        self.how = in_blocks("int8-rough")
        return None

    def golden(self) -> contract.DecoderGolden:
        return self.examples.golden(self.golden_limit)

    def texts(self) -> dict[str, str]:
        return {} if self.chat_template is None else {CHAT_TEMPLATE: self.chat_template}

    def optimisation(self) -> str:
        return self.how

    def fields(self, described: dict[str, contract.Graph]) -> dict[str, Any]:
        source = self.source
        return {
            "width": source.config.d_model,
            "source": self.origin(source.weights_sha256, _layers(source.config.layer_names)),
            "decoder": contract.Decoder(
                states=states_of(source.model),
                takes_positions=source.model.takes_positions,
                n_positions=self.n_positions,
                window=self.window,
                slot_block=contract.SLOT_BLOCK if self.windows else None,
                first_kept=min((layer.n_first for layer in self.windows), default=None),
                max_call_tokens=min((layer.piece for layer in self.windows), default=None),
                bos_token_id=source.bos_token_id,
                eos_token_ids=source.eos_token_ids,
                chat_template=None if self.chat_template is None else CHAT_TEMPLATE,
                exact=self.exact,
                parameters=sum(parameter.numel() for parameter in source.model.parameters()),
                bits_per_byte=self.bits[self.options.precision],
                fp32_bits_per_byte=self.bits["fp32"],
                held_out=None if self.options.held_out is None else self.text.described,
                answers=self.answers,
                image=None if source.image is None else contract.Image(**asdict(source.image)),
            ),
        }


def _windowed(full: Decoder, window: int) -> dict[str, Any]:
    """Return the fields of a checkpoint that change with a window. Raises ExportError for a decoder that cannot have this window."""
    try:
        model = windowed(full, window)
    except ValueError as error:
        raise ExportError(f"--window {window}: {error}") from error
    return {"model": model, "config": model.config}


def _growing(names: tuple[str, ...]) -> str:
    """Return the error message for a decoder whose state grows with the text: it cannot be exported. The message names an alternative."""
    layers: list[Any] = [LAYERS[name] for name in names]
    growing = [number for number, layer in enumerate(layers) if layer.capabilities.state != "constant"]
    others = f" (and {len(growing) - 1} more)" if len(growing) > 1 else ""
    return (
        f"layer {growing[0]} of {len(names)}, counted from 0{others}, is full attention ({names[growing[0]]}), whose state grows with the "
        f"text, and a served state is of constant size. Add `--window 1024`: causal_softmax layers then attend to that many tokens, and "
        f"answers are the same up to them. Or choose a checkpoint whose every layer is linear or has a sliding window"
    )


def _layers(names: tuple[str, ...]) -> str:
    """Summarise the layers, e.g. "delta", or "3 gated_delta, 1 sliding_window"."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return names[0] if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts.items())
