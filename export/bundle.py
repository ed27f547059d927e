"""A checkpoint folder becomes a bundle: load, trace, optimise, check, and only then a directory that anyone may open.

Everything is written to a hidden directory beside the target, which takes the target's name in one step at the end. So a bundle is
complete or absent, and a broken export leaves the bundle before it in place.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from export import contract
from export.checks.golden import MORE_TEXTS, TEXTS, Examples, Tokens
from export.checks.parity import (
    FP32_TOLERANCE,
    Arrays,
    Feed,
    Reference,
    Tensors,
    answers,
    check_interface,
    compare,
    feeds,
    open_graph,
    scale,
)
from export.errors import ExportError
from export.folder import checked_name, files_of, now, replacing, tools
from export.graphs.encoder import PACKED, REWRITTEN, describe, inputs_of, optimise, outputs_of, run_torch, trace
from export.int8.choice import Task, choose
from export.kinds.decoder import is_decoder, write_decoder
from export.kinds.encoder_decoder import is_encoder_decoder, write_encoder_decoder
from export.maps.attention_bundle import add_attention_graph
from models.checkpoints.description import build_encoder
from models.checkpoints.published import ATTENTION_OF_CHECKPOINTS, SWAPPABLE, Checkpoint, load_checkpoint
from models.encoder.model import Encoder
from models.folders.folder import WEIGHTS, in_sentences

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Bar:
    """How far from the fp32 torch model a graph may be, at export and, on the golden texts, when a server starts with it."""

    tolerance: float  # of every output at every size, relative to its largest value where that is above 1
    min_cosine: float  # of every golden text
    logit_error: float  # of every golden logit, relative to the largest where that is above 1


BARS = {
    # Another order of the same sums, at export and on the processor of a server.
    "fp32": Bar(FP32_TOLERANCE, min_cosine=0.9999, logit_error=1e-3),
    # 11 bits a number instead of 24.
    "fp16": Bar(0.02, min_cosine=0.999, logit_error=0.02),
    # Judged by the cosine that the caller asks for; the tolerance only finds graphs that are broken.
    "int8": Bar(1.0, min_cosine=0.99, logit_error=0.25),
}
ABOUT_FP16 = "weights in float16, for a GPU: a CPU widens them to float32 and is not faster"


def export_file(file: Path, out: Path, **how: Any) -> contract.Manifest:
    """The bundle of an encoder that is described by a file; see `models/checkpoints/`. `how` are the keywords of `export_bundle`."""
    with TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / file.stem  # which the manifest names
        build_encoder(file, checkpoint)
        return export_bundle(checkpoint, out, **how)


def export_bundle(
    checkpoint: Path,
    out: Path,
    *,
    name: str | None = None,
    precision: contract.Precision = "fp32",
    attention: str = "softmax",
    min_cosine: float = 0.99,
    held_out: Path | None = None,
    maps: bool = False,
    progress: Progress = lambda step, fraction: None,
) -> contract.Manifest:
    """Write the bundle `out`, in the place of a bundle that is there already, and return its manifest.

    `name` is what clients send as `model`; None: the name of the directory `out`. `min_cosine` is what an int8 graph of an encoder must
    reach on every text, `held_out` the text by whose bits per byte a decoder's precision is judged (None: a few passages). `maps` adds the
    attention graph. `progress` is told each step as it begins, and how far the long ones are (0 to 1). Raises CheckpointError for the
    folder, CorpusError for a `held_out` that is no data folder, ExportError for everything else; then `out` is as it was.
    """
    with in_sentences(f"{checkpoint} cannot be exported", ExportError):
        return _export(checkpoint, out, name, precision, attention, min_cosine, held_out, maps, progress)


def _export(
    checkpoint: Path,
    out: Path,
    name: str | None,
    precision: contract.Precision,
    attention: str,
    min_cosine: float,
    held_out: Path | None,
    maps: bool,
    progress: Progress,
) -> contract.Manifest:
    name = checked_name(name or out.resolve().name)
    if maps and precision != "fp32":
        raise ExportError(f"maps are computed with the weights of an fp32 graph, and precision={precision}; leave out one of the two")
    bar = replace(BARS[precision], min_cosine=min_cosine) if precision == "int8" else BARS[precision]
    with replacing(out) as folder, TemporaryDirectory(dir=folder) as temporary:
        scratch = Path(temporary)
        progress("load", None)
        if is_encoder_decoder(checkpoint):
            if (precision, attention, held_out, maps) != ("fp32", "softmax", None, False):
                raise ExportError("an encoder-decoder is exported in fp32 as it is: leave out precision, attention, held_out and maps")
            return write_encoder_decoder(checkpoint, folder, scratch, name=name, progress=progress)
        if is_decoder(checkpoint):
            if attention != "softmax":
                raise ExportError(f"attention={attention!r} is for encoders; the layers of a decoder are those it was trained with")
            return write_decoder(
                checkpoint, folder, scratch, name=name, precision=precision, held_out=held_out, maps=maps, progress=progress
            )
        if held_out is not None:
            raise ExportError(f"held_out={str(held_out)!r} is for decoders; an encoder is judged by the cosines of its golden texts")
        source = load_checkpoint(checkpoint, attention=attention)
        packed = isinstance(source.model.encoder, Encoder)
        if maps and not packed:
            raise ExportError(f"{source.architecture} has no attention maps: its blocks are not those of an encoder; leave out maps")
        subject = Subject.of(source)

        progress("trace", None)
        # Weights beside the graph are mapped at load: rows of the vocabulary that nobody uses take no memory.
        trace(source, scratch / "traced.onnx", weights_beside=True)
        progress("optimise", None)
        graph = optimise(scratch / "traced.onnx", scratch / "fp32")
        progress("check", None)
        parity = subject.check(graph, BARS["fp32"])
        how = f"{PACKED}; {REWRITTEN}" if packed else REWRITTEN
        trials: tuple[contract.Trial, ...] = ()

        if precision == "fp16":
            progress("fp16", None)
            graph, how = _half(source, scratch), f"{PACKED}; {ABOUT_FP16}" if packed else ABOUT_FP16
        if precision == "int8":
            progress("int8", 0.0)
            graph, trials = _int8(subject, graph, scratch, min_cosine, lambda fraction: progress("int8", fraction))
            how += "; products in 8-bit integers: " + next(trial.recipe for trial in trials if trial.kept)
        if precision != "fp32":
            progress("check", None)
            parity = subject.check(graph, bar)

        progress("write", None)
        for file in graph.parent.glob(f"{graph.name}*"):
            file.rename(folder / file.name)
        shutil.copyfile(source.tokenizer_file, folder / contract.TOKENIZER)
        (folder / contract.GOLDEN).write_text(subject.golden(bar).model_dump_json(), encoding="utf-8")
        graph_of_maps = None
        if maps:
            progress("maps", None)
            limits = {"max_tokens": source.max_tokens, "vocab_size": source.config.vocab_size}
            graph_of_maps = add_attention_graph(source.model.encoder, folder, scratch, **limits)
        manifest = subject.manifest(folder, name, precision, parity, trials, how, graph_of_maps)
        (folder / contract.MANIFEST).write_text(contract.dump(manifest), encoding="utf-8")
    return manifest


@dataclass(frozen=True)
class Subject:
    """The model that is exported, and what its graphs are held against."""

    source: Checkpoint
    inputs: Tensors
    outputs: Tensors
    sizes: list[Feed]
    examples: Examples

    @classmethod
    def of(cls, source: Checkpoint) -> "Subject":
        inputs, outputs = inputs_of(source), outputs_of(source)
        sizes = feeds(inputs, vocab_size=source.config.vocab_size, pad_token_id=source.pad_token_id, max_tokens=source.max_tokens)
        return cls(source, inputs, outputs, sizes, examples_of(source, TEXTS))

    def check(self, graph: Path, bar: Bar) -> contract.Parity:
        """Hold a graph against the model. Raises ExportError for the first thing that differs."""
        session = open_graph(graph)
        check_interface(session, self.inputs, self.outputs)
        error = compare(session, torch_reference(self.source), self.outputs, self.sizes, tolerance=bar.tolerance)
        rows = self.examples.run(answers(session, self.outputs))
        cosines = self.examples.cosines(rows)
        if not (worst := float(cosines.min())) >= bar.min_cosine:
            where = f" at {self.examples.texts[cosines.argmin()]!r}" if self.source.kind == "encoder" else ""
            raise ExportError(f"the lowest cosine on the golden texts is {worst:.6f}{where}, and {bar.min_cosine} is needed")
        apart = float(np.abs(rows - self.examples.rows).max())
        if self.source.kind != "encoder" and not apart <= (allowed := self.logit_error(bar)):
            raise ExportError(f"a logit of the golden texts is off by {apart:.3g}, and {allowed:.3g} is allowed")
        shapes = tuple((int(B), int(N)) for B, N in (feed[contract.ATTENTION_MASK].shape for feed in self.sizes))
        return contract.Parity(max_abs_error=error, min_cosine=worst, shapes=shapes, tolerance=bar.tolerance)

    def golden(self, bar: Bar) -> contract.Golden:
        encoder = self.source.kind == "encoder"
        return contract.Golden(
            texts=self.examples.texts,
            pairs=self.examples.pairs,
            outputs=tuple(tuple(map(float, row)) for row in self.examples.rows),
            min_cosine=bar.min_cosine if encoder else None,
            max_abs_error=None if encoder else self.logit_error(bar),
        )

    def logit_error(self, bar: Bar) -> float:
        return bar.logit_error * scale(self.examples.rows)

    def manifest(
        self,
        folder: Path,
        name: str,
        precision: contract.Precision,
        parity: contract.Parity,
        trials: tuple[contract.Trial, ...],
        optimisation: str,
        attention_graph: contract.AttentionGraph | None,
    ) -> contract.Manifest:
        """The account of the files in `folder`, which are complete."""
        source = self.source
        return contract.Manifest(
            name=name,
            kind=source.kind,
            precision=precision,
            files=files_of(folder),
            graph=describe(folder / contract.GRAPH, self.inputs, self.outputs, optimisation),
            limits=contract.Limits(max_tokens=source.max_tokens, vocab_size=source.config.vocab_size),
            source=_source(source),
            parity=parity,
            trials=trials,
            attention_graph=attention_graph,
            pooling=source.pooling,
            normalized=source.normalized,
            width=int(self.outputs[0].shape[-1]),
            pad_token_id=source.pad_token_id,
            prompts=source.prompts,
            default_prompt=source.default_prompt,
            id2label=source.id2label,
            score_activation=source.score_activation,
            created=now(),
            tool=tools(),
        )


def examples_of(source: Checkpoint, texts: Sequence[str]) -> Examples:
    """These texts as the model's tokenizer cuts them, with torch's rows for them."""
    return Examples(source.kind, Tokens(source.tokenizer_file, source.max_tokens), inputs_of(source), torch_reference(source), texts)


def torch_reference(source: Checkpoint) -> Reference:
    """The model in torch, as a function of arrays."""

    def answer(feed: Feed) -> Arrays:
        values = run_torch(source, {name: torch.from_numpy(value) for name, value in feed.items()})
        return {name: value.numpy() for name, value in values.items()}

    return answer


def _half(source: Checkpoint, scratch: Path) -> Path:
    """Not rewritten here: onnxruntime would do it for this machine's CPU, and put its casts to float32 into the file."""
    file = scratch / "fp16" / contract.GRAPH
    file.parent.mkdir()
    swapped = source.config.attention if source.config.attention in SWAPPABLE else ATTENTION_OF_CHECKPOINTS
    trace(load_checkpoint(source.folder, attention=swapped, dtype=torch.float16), file)
    return file


def _int8(
    subject: Subject, fp32: Path, scratch: Path, min_cosine: float, progress: Callable[[float], None]
) -> tuple[Path, tuple[contract.Trial, ...]]:
    source = subject.source
    trace(source, scratch / "separate.onnx", separate_projections=True)
    task = Task(
        graph=scratch / "separate.onnx",
        fp32=fp32,
        judged=examples_of(source, [*TEXTS, *MORE_TEXTS]),
        calibration=examples_of(source, MORE_TEXTS),
        outputs=subject.outputs,
        vocab_size=source.config.vocab_size,
        min_cosine=min_cosine,
    )
    return choose(task, scratch, progress=progress)


def _source(source: Checkpoint) -> contract.Source:
    folder = source.tokenizer_file.parent
    weights = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))
    digests = [contract.sha256(file) for file in weights]
    return contract.Source(
        architecture=source.architecture,
        checkpoint=source.folder.resolve().name,
        weights_sha256=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
        attention=source.config.attention,
        untrained=source.untrained,
    )
