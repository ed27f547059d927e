"""An encoder-decoder's folder becomes a bundle: both graphs, traced, optimised, held against torch and against themselves."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from export import contract
from export.checks.parity import Tensors, answers, check_interface, compare, feeds, open_graph, scale
from export.errors import ExportError
from export.folder import files_of, now, tools
from export.graphs.encoder import REWRITTEN, describe, optimise
from export.graphs.encoder_decoder import Graphs
from models.encoder_decoder.checkpoint import ARCHITECTURES, CONFIG, EncoderDecoderCheckpoint, load_encoder_decoder
from models.folders.folder import read_settings, read_tokenizer

Arrays = Mapping[str, NDArray[Any]]
Answer = Callable[[Any], Arrays]
Progress = Callable[[str, float | None], None]

# The same sums in another order, over the steps of a source and an output: 1e-6 to 1e-5 measured. Relative to the largest value of a tensor
# where that is above 1.
TOLERANCE = 1e-4
LOGIT_ERROR = 1e-3  # of every golden logit, on another processor too, relative to the largest where that is above 1
STEPS = 8  # compared at each size
TOP = 5  # logits of a golden step that are kept
HOW = f"a reader and a step; GRUs as operators of onnxruntime; {REWRITTEN}"


def is_encoder_decoder(checkpoint: Path) -> bool:
    """Whether the folder's config.json names an encoder-decoder."""
    architectures = read_settings(checkpoint / CONFIG, required=False).get("architectures", [])
    return bool(architectures) and architectures[0] in ARCHITECTURES


@dataclass(frozen=True)
class Writer:
    """Both graphs, or torch in their place, called with plain arrays."""

    reader: Answer
    step: Answer
    begin_token_id: int

    def logits(self, ids: NDArray[np.int64], mask: NDArray[np.int64], outputs: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Sources (B, N), what is written for them (B, T) -> the logits before each token (B, T, V), and the attention (B, T, N)."""
        known = dict(self.reader({contract.INPUT_IDS: ids, contract.ATTENTION_MASK: mask}))
        previous, logits, attention = np.full(len(ids), self.begin_token_id), [], []
        for tokens in outputs.T:
            made = self.step({contract.PREVIOUS: previous, contract.ATTENTION_MASK: mask, **known})
            known |= {name.removeprefix("new_"): value for name, value in made.items() if name.startswith("new_")}
            logits.append(made[contract.STEP_LOGITS])
            attention.append(made[contract.ATTENTION])
            previous = np.ascontiguousarray(tokens)
        return np.stack(logits, axis=1), np.stack(attention, axis=1)

    def greedy(self, ids: list[int], *, end_token_id: int, max_output: int) -> tuple[list[int], NDArray[Any]]:
        """The likeliest tokens after one source, and the logits before each (T, V)."""
        source, written = np.array([ids], np.int64), list[int]()
        while True:
            logits, _ = self.logits(source, np.ones_like(source), np.array([[*written, 0]], np.int64))
            written.append(int(logits[0, -1].argmax()))
            if written[-1] == end_token_id or len(written) == max_output:
                return written, logits[0]


def write_encoder_decoder(checkpoint: Path, folder: Path, scratch: Path, *, name: str, progress: Progress) -> contract.Manifest:
    """Fill `folder` with the bundle. Raises CheckpointError for the checkpoint, ExportError for what is wrong with a graph."""
    source = load_encoder_decoder(checkpoint)
    graphs, config = Graphs(source.model), source.model.config
    progress("trace", None)
    graphs.trace(scratch / "reader.onnx", scratch / "step.onnx")
    progress("optimise", None)
    reader = optimise(scratch / "reader.onnx", scratch / "reader")
    step = optimise(scratch / "step.onnx", scratch / "step")
    progress("check", None)
    parity = check(source, graphs, reader, step)
    golden = _golden(source, _torch_writer(source, graphs))
    progress("write", None)
    reader.rename(folder / contract.READER)
    step.rename(folder / contract.GRAPH)
    shutil.copyfile(source.tokenizer_file, folder / contract.TOKENIZER)
    (folder / contract.GOLDEN).write_text(golden.model_dump_json(), encoding="utf-8")
    manifest = contract.Manifest(
        name=name,
        kind="encoder_decoder",
        precision="fp32",
        files=files_of(folder),
        graph=describe(folder / contract.GRAPH, graphs.step_inputs, graphs.step_outputs, HOW),
        limits=contract.Limits(max_tokens=config.max_source, vocab_size=config.vocab_size),
        source=contract.Source(
            architecture=source.architecture,
            checkpoint=source.folder.resolve().name,
            weights_sha256=source.weights_sha256,
            attention=getattr(config, "score", "softmax"),
            untrained=False,
        ),
        parity=parity,
        encoder_decoder=contract.EncoderDecoder(
            reader=describe(folder / contract.READER, graphs.reader_inputs, graphs.reader_outputs, HOW),
            begin_token_id=config.begin_token_id,
            end_token_id=config.end_token_id,
            max_output=config.max_output,
            parameters=sum(parameter.numel() for parameter in source.model.parameters()),
        ),
        normalized=False,
        width=config.vocab_size,
        created=now(),
        tool=tools(),
    )
    (folder / contract.MANIFEST).write_text(contract.dump(manifest), encoding="utf-8")
    return manifest


def check(source: EncoderDecoderCheckpoint, graphs: Graphs, reader: Path, step: Path) -> contract.Parity:
    """Names, axes, shapes; values of the reader, and of steps one after the other; then a row alone against the same in a padded batch.

    Raises ExportError for the first thing that differs.
    """
    config = source.model.config
    sessions = open_graph(reader), open_graph(step)
    check_interface(sessions[0], graphs.reader_inputs, graphs.reader_outputs)
    check_interface(sessions[1], graphs.step_inputs, graphs.step_outputs)
    model = _torch_writer(source, graphs)
    graph = Writer(answers(sessions[0], graphs.reader_outputs), answers(sessions[1], graphs.step_outputs), config.begin_token_id)
    sizes = feeds(graphs.reader_inputs, vocab_size=config.vocab_size, pad_token_id=0, max_tokens=config.max_source)
    error = compare(sessions[0], model.reader, graphs.reader_outputs, sizes, tolerance=TOLERANCE)
    random = np.random.default_rng(0)
    cosine = 1.0
    for feed in sizes:
        ids, mask = feed[contract.INPUT_IDS], feed[contract.ATTENTION_MASK]
        outputs = random.integers(0, config.vocab_size, (len(ids), min(STEPS, config.max_output)))
        got, want = graph.logits(ids, mask, outputs), model.logits(ids, mask, outputs)
        where = f"at B={ids.shape[0]}, N={ids.shape[1]}"
        for name, ours, theirs in zip((contract.STEP_LOGITS, contract.ATTENTION), got, want, strict=True):
            error = max(error, _near(ours, theirs, f"{name}: {where} the steps are", "the model"))
        cosine = min(cosine, _cosine(got[0], want[0]))
        for row, length in enumerate(mask.sum(axis=1)):
            if length:
                alone = graph.logits(ids[row : row + 1, :length], mask[row : row + 1, :length], outputs[row : row + 1])[0]
                _near(alone, got[0][row : row + 1], f"logits: {where} row {row} alone is", "itself in the batch")
    shapes = tuple((int(B), int(N)) for B, N in (feed[contract.ATTENTION_MASK].shape for feed in sizes))
    return contract.Parity(max_abs_error=error, min_cosine=cosine, shapes=shapes, tolerance=TOLERANCE)


def _near(got: NDArray[Any], want: NDArray[Any], what: str, from_what: str) -> float:
    apart, allowed = float(np.abs(got - want).max(initial=0.0)), TOLERANCE * scale(want)
    if not apart <= allowed:  # not `>`: NaN must fail
        raise ExportError(f"{what} {apart:.3g} away from {from_what}, and {allowed:.3g} is allowed")
    return apart


def _cosine(got: NDArray[Any], want: NDArray[Any]) -> float:
    """The lowest of any step's logits, less their mean."""
    one, other = (each - each.mean(axis=-1, keepdims=True) for each in (got, want))
    return float(((one * other).sum(-1) / (np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1))).min())


def _golden(source: EncoderDecoderCheckpoint, model: Writer) -> contract.EncoderDecoderGolden:
    config, tokenizer = source.model.config, read_tokenizer(source.tokenizer_file)
    if (size := tokenizer.get_vocab_size()) > config.vocab_size:
        raise ExportError(f"{source.tokenizer_file} has {size} tokens, and the model {config.vocab_size}: they are not of one kind")
    token_ids = [tokenizer.encode(text).ids for text in source.examples]
    for text, ids in zip(source.examples, token_ids, strict=True):
        if not 0 < len(ids) <= config.max_source:
            raise ExportError(f"{source.folder}: the example {text!r} has {len(ids)} tokens, and 1 to {config.max_source} are read")
    written = [model.greedy(ids, end_token_id=config.end_token_id, max_output=config.max_output) for ids in token_ids]
    top = [np.argsort(-logits, axis=1, kind="stable")[:, :TOP] for _, logits in written]
    return contract.EncoderDecoderGolden(
        texts=source.examples,
        token_ids=tuple(map(tuple, token_ids)),
        outputs=tuple(tuple(tokens) for tokens, _ in written),
        logits=tuple(
            tuple(tuple(map(float, row[ids])) for row, ids in zip(logits, best, strict=True))
            for (_, logits), best in zip(written, top, strict=True)
        ),
        top_token_ids=tuple(tuple(tuple(map(int, ids)) for ids in best) for best in top),
        max_abs_error=LOGIT_ERROR * max(scale(logits) for _, logits in written),
    )


def _torch_writer(source: EncoderDecoderCheckpoint, graphs: Graphs) -> Writer:
    """The model as it is in torch, the GRUs its own."""
    model = source.model

    def read(feed: Arrays) -> Arrays:
        with torch.inference_mode():
            memory, state = model.read(_tensor(feed, graphs.reader_inputs[0]), _mask(feed))
        return _named(graphs.reader_outputs, (*memory.values(), *state.values()))

    def step(feed: Arrays) -> Arrays:
        memory, state = (
            {tensor.name.removeprefix(prefix): _tensor(feed, tensor) for tensor in graphs.step_inputs if tensor.name.startswith(prefix)}
            for prefix in ("memory_", "state_")
        )
        with torch.inference_mode():
            logits, new, weights = model.step(torch.from_numpy(feed[contract.PREVIOUS]), state, memory, _mask(feed))
        return _named(graphs.step_outputs, (logits, weights, *(new[name] for name in state)))

    return Writer(read, step, model.config.begin_token_id)


def _tensor(feed: Arrays, tensor: contract.Tensor) -> torch.Tensor:
    return torch.from_numpy(feed[tensor.name])


def _mask(feed: Arrays) -> torch.Tensor:
    return torch.from_numpy(feed[contract.ATTENTION_MASK] != 0)


def _named(tensors: Tensors, values: tuple[torch.Tensor, ...]) -> Arrays:
    return {tensor.name: value.numpy() for tensor, value in zip(tensors, values, strict=True)}
