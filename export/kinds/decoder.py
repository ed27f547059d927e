"""A decoder's folder becomes a bundle: the step graph, traced, optimised, held against torch, and then against itself bit for bit."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from tokenizers import Tokenizer

from export import contract
from export.checks.bits_per_byte import Text, bits_per_byte, read_text
from export.checks.decoder_parity import TOLERANCE, Steps, compare, inexact, sizes_within
from export.checks.golden import PASSAGES, DecoderExamples, cosines
from export.checks.parity import Arrays, Feed, Reference, answers, check_interface, open_graph, scale
from export.errors import ExportError
from export.folder import files_of, now, tools
from export.graphs.decoder_step import StepGraph, inputs_of, outputs_of, states_of, trace
from export.graphs.encoder import REWRITTEN, describe, optimise, save
from export.int8.recipes import per_block
from export.maps.attention_bundle import add_attention_graph
from models import LAYERS
from models.checkpoints.decoder import ARCHITECTURE, CONFIG, DecoderCheckpoint, load_decoder
from models.checkpoints.families import DECODERS
from models.checkpoints.published import UNLIMITED
from models.decoder.model import Decoder
from models.folders.folder import read_settings, read_tokenizer

Progress = Callable[[str, float | None], None]

OPERATORS = "recurrences and short convolutions as operators of onnxruntime, for any number of tokens"
BLOCK = 32  # weights with one scale; blocks of 128 give a row other bits in other batches


@dataclass(frozen=True)
class Bar:
    """How far from the fp32 torch model a graph may be."""

    tolerance: float  # of logits and states at every size, relative to the largest value where that is above 1
    logit_error: float  # of every golden logit, on another processor too, relative to the largest where that is above 1
    lost_bits: float = 0.05  # share by which bits per byte may rise


BARS = {
    # Another order of the same sums, at export and on the processor of a server.
    "fp32": Bar(TOLERANCE, logit_error=1e-3),
    # 11 bits a number instead of 24, and states that add up what was rounded.
    "fp16": Bar(0.05, logit_error=0.05),
    # Judged by bits per byte; the tolerance only finds graphs that are broken.
    "int8": Bar(1.0, logit_error=0.25),
}
HOW = {
    "fp32": f"{OPERATORS}; {REWRITTEN}",
    "fp16": f"{OPERATORS}; weights in float16, for a GPU: a CPU widens them to float32 and is not faster",
    "int8": f"{OPERATORS}; {REWRITTEN}; products in 8-bit integers: a scale per {BLOCK} values (MatMulNBits)",
}


def is_decoder(checkpoint: Path) -> bool:
    """Whether the folder's config.json names a decoder that `load_decoder` knows."""
    architectures = read_settings(checkpoint / CONFIG, required=False).get("architectures", [])
    return bool(architectures) and architectures[0] in (ARCHITECTURE, *DECODERS)


def write_decoder(
    checkpoint: Path,
    folder: Path,
    scratch: Path,
    *,
    name: str,
    precision: contract.Precision,
    held_out: Path | None,
    maps: bool,
    progress: Progress,
) -> contract.Manifest:
    """Fill `folder` with the bundle of a decoder. `held_out` is the text that a precision is judged by; see `held_out.read_text`. `maps`
    adds the attention graph.

    Raises CheckpointError for the checkpoint, CorpusError and ExportError for the text, ExportError for what is wrong with a graph.
    """
    subject = Subject.of(load_decoder(checkpoint), None if held_out is None else read_text(held_out))
    read = partial(progress, "bits per byte")
    progress("trace", None)
    trace(subject.source.model, scratch / "traced.onnx")
    progress("optimise", None)
    graph = optimise(scratch / "traced.onnx", scratch / "fp32")
    progress("check", None)
    checked = fp32 = subject.check(graph, BARS["fp32"], read)
    if not fp32.exact:
        raise ExportError(f"the graph is not exact: {fp32.inexact}. A state would depend on how its prompt was cut and on its neighbours")
    if precision != "fp32":
        progress(precision, None)
        graph = _half(checkpoint, scratch) if precision == "fp16" else _int8(graph, scratch)
        progress("check", None)
        checked = subject.check(graph, BARS[precision], read)
        if checked.bits_per_byte > (most := fp32.bits_per_byte * (1 + BARS[precision].lost_bits)):
            raise ExportError(f"{precision} takes {checked.bits_per_byte:.3f} bits per byte, and {most:.3f} are allowed. Keep fp32")

    progress("write", None)
    for file in graph.parent.glob(f"{graph.name}*"):
        file.rename(folder / file.name)
    shutil.copyfile(subject.source.tokenizer_file, folder / contract.TOKENIZER)
    if subject.source.chat_template is not None:
        shutil.copyfile(subject.source.chat_template, folder / subject.source.chat_template.name)
    golden = subject.examples.golden(BARS[precision].logit_error * scale(subject.examples.logits))
    (folder / contract.GOLDEN).write_text(golden.model_dump_json(), encoding="utf-8")
    graph_of_maps = None
    if maps:
        progress("maps", None)
        vocab_size = subject.source.config.vocab_size
        graph_of_maps = add_attention_graph(subject.source.model, folder, scratch, max_tokens=subject.longest, vocab_size=vocab_size)
    manifest = subject.manifest(folder, name, precision, checked, fp32, graph_of_maps)
    (folder / contract.MANIFEST).write_text(contract.dump(manifest), encoding="utf-8")
    return manifest


@dataclass(frozen=True)
class Checked:
    """What came of holding a graph against the model."""

    parity: contract.Parity
    inexact: str | None  # what changes the bits of a row
    bits_per_byte: float

    @property
    def exact(self) -> bool:
        return self.inexact is None


@dataclass(frozen=True)
class Subject:
    """The decoder that is exported, and what its graphs are held against."""

    source: DecoderCheckpoint
    held_out: Text | None  # None: judged by the golden passages
    inputs: tuple[contract.Tensor, ...]
    outputs: tuple[contract.Tensor, ...]
    tokenizer: Tokenizer
    reference: Steps
    examples: DecoderExamples

    @classmethod
    def of(cls, source: DecoderCheckpoint, held_out: Text | None) -> "Subject":
        if source.model.grows:
            raise ExportError(f"{source.folder}: {_growing(source.config.layer_names)}")
        inputs, tokenizer = inputs_of(source.model), read_tokenizer(source.tokenizer_file)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        if (size := tokenizer.get_vocab_size()) > source.config.vocab_size:
            raise ExportError(
                f"{source.tokenizer_file} has {size} tokens, and the model {source.config.vocab_size}: they are not of one kind"
            )
        _check_image(source, tokenizer)
        reference = Steps(torch_reference(source.model), inputs, n_positions=source.config.n_positions)
        return cls(source, held_out, inputs, outputs_of(source.model), tokenizer, reference, DecoderExamples(tokenizer, reference))

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        n_positions: int | None = self.source.config.n_positions
        return n_positions or UNLIMITED

    def check(self, graph: Path, bar: Bar, read: Callable[[float], None]) -> Checked:
        """Names, axes, shapes, values, and then exactness. Raises ExportError for the first thing that differs from the model."""
        check_interface(open_graph(graph), self.inputs, self.outputs)
        steps, vocab_size = self._steps(graph, 0), self.source.config.vocab_size
        error = compare(steps, self.reference, vocab_size=vocab_size, tolerance=bar.tolerance)
        rows = self.examples.run(steps)
        apart, allowed = float(np.abs(rows - self.examples.logits).max()), bar.logit_error * scale(self.examples.logits)
        if not apart <= allowed:
            raise ExportError(f"a logit of the golden prompts is off by {apart:.3g}, and {allowed:.3g} is allowed")
        likeness = cosines(*(logits - logits.mean(axis=1, keepdims=True) for logits in (rows, self.examples.logits)))
        parity = contract.Parity(
            max_abs_error=error,
            min_cosine=float(likeness.min()),
            shapes=tuple(first for first, _ in sizes_within(self.source.config.n_positions)),
            tolerance=bar.tolerance,
        )
        what = inexact(lambda threads: self._steps(graph, threads), vocab_size=vocab_size)
        return Checked(parity, what, self._bits_per_byte(steps, read))

    def manifest(
        self,
        folder: Path,
        name: str,
        precision: contract.Precision,
        checked: Checked,
        fp32: Checked,
        attention_graph: contract.AttentionGraph | None,
    ) -> contract.Manifest:
        """The account of the files in `folder`, which are complete."""
        source = self.source
        return contract.Manifest(
            name=name,
            kind="decoder",
            precision=precision,
            files=files_of(folder),
            graph=describe(folder / contract.GRAPH, self.inputs, self.outputs, HOW[precision]),
            limits=contract.Limits(max_tokens=self.longest, vocab_size=source.config.vocab_size),
            source=contract.Source(
                architecture=source.architecture,
                checkpoint=source.folder.resolve().name,
                weights_sha256=source.weights_sha256,
                attention=_layers(source.config.layer_names),
                untrained=False,
            ),
            parity=checked.parity,
            attention_graph=attention_graph,
            decoder=contract.Decoder(
                states=states_of(source.model),
                takes_positions=source.model.takes_positions,
                n_positions=source.config.n_positions,
                bos_token_id=source.bos_token_id,
                eos_token_ids=source.eos_token_ids,
                chat_template=None if source.chat_template is None else source.chat_template.name,
                exact=checked.exact,
                parameters=sum(parameter.numel() for parameter in source.model.parameters()),
                bits_per_byte=checked.bits_per_byte,
                fp32_bits_per_byte=fp32.bits_per_byte,
                held_out=None if self.held_out is None else self.held_out.described,
                image=None if source.image is None else contract.Image(**asdict(source.image)),
            ),
            normalized=False,
            width=source.config.d_model,
            created=now(),
            tool=tools(),
        )

    def _bits_per_byte(self, steps: Steps, read: Callable[[float], None]) -> float:
        text = self.held_out or Text("the golden passages", PASSAGES)
        eos_token_id = next(iter(self.source.eos_token_ids), None)
        return bits_per_byte(steps, self.tokenizer, text, bos_token_id=self.source.bos_token_id, eos_token_id=eos_token_id, show=read)

    def _steps(self, graph: Path, threads: int) -> Steps:
        return Steps(answers(open_graph(graph, threads=threads), self.outputs), self.inputs, n_positions=self.source.config.n_positions)


def torch_reference(decoder: Decoder) -> Reference:
    """The decoder in torch, as a function of arrays."""
    step, inputs, outputs = StepGraph(decoder), inputs_of(decoder), outputs_of(decoder)

    def answer(feed: Feed) -> Arrays:
        with torch.inference_mode():
            values = step(*(torch.from_numpy(feed[tensor.name]) for tensor in inputs))
        return {tensor.name: value.numpy() for tensor, value in zip(outputs, values, strict=True)}

    return answer


def _half(checkpoint: Path, scratch: Path) -> Path:
    """Not rewritten here: onnxruntime would do it for this machine's CPU, and put its casts to float32 into the file."""
    file = scratch / "fp16" / contract.GRAPH
    file.parent.mkdir()
    trace(load_decoder(checkpoint, dtype=torch.float16).model, file)
    return file


def _int8(graph: Path, scratch: Path) -> Path:
    """The optimised fp32 graph, whose weights are constants, with 8-bit products."""
    save(per_block(onnx.load(graph), {}, block=BLOCK), scratch / "int8.onnx")
    return optimise(scratch / "int8.onnx", scratch / "int8")


def _check_image(source: DecoderCheckpoint, tokenizer: Tokenizer) -> None:
    """Raises ExportError for a picture whose last pixels have no position."""
    image, n_positions = source.image, source.config.n_positions
    if image is None or n_positions is None:
        return
    longest = max(len(tokenizer.encode(prompt).ids) for prompt in image.prompts) + image.n_pixels - 1  # the last pixel is not read
    if longest > n_positions:
        raise ExportError(f"{source.folder}: a prompt and its pixels need {longest} positions, and the model has n_positions={n_positions}")


def _growing(names: tuple[str, ...]) -> str:
    """Why a decoder whose state grows is not exported, and what to do about it."""
    layers: list[Any] = [LAYERS[name] for name in names]
    growing = [number for number, layer in enumerate(layers) if layer.capabilities.state != "constant"]
    others = f" (and {len(growing) - 1} more)" if len(growing) > 1 else ""
    return (
        f"layer {growing[0]} of {len(names)}, counted from 0{others}, is full attention ({names[growing[0]]}), whose state grows with the "
        f"text, and a served state is of constant size. Choose a checkpoint whose every layer is linear or has a sliding window; one of "
        f"causal_softmax layers alone can be measured against with `python -m export.kv_cache.graph`"
    )


def _layers(names: tuple[str, ...]) -> str:
    """ "delta", or "3 gated_delta, 1 sliding_window"."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return names[0] if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts.items())
