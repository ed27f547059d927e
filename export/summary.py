"""Renders a bundle as tables for `attnserve inspect`. This file imports neither torch nor onnx."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from export import contract

BAR = 40  # length of the longest bar, in characters
_USES = {
    "encoder": "vectors of texts: /v1/embeddings",
    "reranker": "scores of documents for a query: /v1/rerank",
    "classifier": "labels of texts: /predict",
    "token_classifier": "labels of each token: /predict",
    "encoder_decoder": "a text for a text: /v1/completions",
}


def render(bundle: Path, *, graph: bool = False) -> RenderableType:
    """Return the manifest as tables, with a histogram of operators if `graph`. Raises BundleError if any byte was changed."""
    manifest = contract.verify(bundle)
    parts: list[RenderableType] = [_facts(_chiefly(manifest)), "", _facts(_details(manifest)), "", _files(manifest)]
    if manifest.trials:
        parts += ["", _trials(manifest.trials)]
    for evaluation in manifest.evaluations or ():
        parts += ["", _evaluation(evaluation)]
    if graph:
        parts += ["", _operators(manifest.graph.operators)]
    return Group(*parts)


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in facts:
        table.add_row(fact, escape(value))
    return table


def _chiefly(manifest: contract.Manifest) -> Iterator[tuple[str, str]]:
    """Yield what a reader asks first: what the model is, what it answers and how much it takes."""
    unlimited = manifest.decoder is not None and manifest.decoder.n_positions is None
    yield "name", manifest.name
    yield "kind", manifest.kind
    yield "answers", _use(manifest)
    yield "limits", f"{'any number of' if unlimited else manifest.limits.max_tokens} tokens, vocabulary of {manifest.limits.vocab_size:,}"
    yield "precision", manifest.precision
    if manifest.decoder is not None and manifest.decoder.answers is not None:
        yield "accuracy", manifest.decoder.answers.in_words
    yield "size", _size(sum(file.size_bytes for file in manifest.files))
    yield "fingerprint", manifest.fingerprint


def _use(manifest: contract.Manifest) -> str:
    """Return what the model answers, and the first route for it."""
    if (decoder := manifest.decoder) is not None:
        if decoder.image is not None:
            return "pictures: /v1/images/generations"
        return f"text: /v1/completions{'' if decoder.chat_template is None else ', /v1/chat/completions'}"
    return _USES[manifest.kind]


def _details(manifest: contract.Manifest) -> Iterator[tuple[str, str]]:
    source, graph = manifest.source, manifest.graph
    yield "model", f"{source.architecture} from {source.checkpoint}, weights {source.weights_sha256[:12]}"
    yield "attention", source.attention + (", not trained: for measuring, not for use" if source.untrained else "")
    if manifest.decoder is not None:
        yield from _of_decoder(manifest, manifest.decoder)
    elif (both := manifest.encoder_decoder) is not None:
        yield "parameters", f"{both.parameters:,}"
        yield "writes", f"{both.max_output} tokens at most, the end included"
        yield "reader", f"{_tensors(both.reader.inputs)} -> {_tensors(both.reader.outputs)}"
    elif manifest.traits.has_labels:
        yield "labels", f"{', '.join(manifest.id2label.values())}; scores by {manifest.score_activation}"
    else:
        ending = "normalised" if manifest.normalized else "not normalised"
        yield "vectors", f"{manifest.width} wide, {manifest.pooling} pooling, {ending} in the checkpoint's own pipeline"
    if manifest.prompts:
        yield "prompts", ", ".join(f"{name}: {text!r}" for name, text in manifest.prompts.items())
    yield "inputs", _tensors(graph.inputs)
    yield "outputs", _tensors(graph.outputs)
    yield "graph", f"opset {graph.opset}, {sum(graph.operators.values())} operators; {graph.optimisation}"
    yield "against torch", _near(manifest.parity)
    if (short := manifest.short_graph) is not None:
        operators = sum(short.graph.operators.values())
        yield (
            "short texts",
            f"up to {short.max_tokens} tokens: {short.attention}, {operators} operators; against torch {_near(short.parity)}",
        )
    if (maps := manifest.attention_graph) is not None:
        told = f"{len(maps.layers)} layers, up to {maps.max_tokens} tokens, largest difference from torch {maps.max_abs_error:.1e}"
        yield "attention maps", told
    yield "written", f"{manifest.created} by {manifest.tool}"


def _near(parity: contract.Parity) -> str:
    # Bundles of earlier versions have tolerances as large as the values themselves, which no graph could miss.
    limited = parity.tolerance is not None and parity.tolerance < 1
    limit = f"limit {parity.tolerance:.1e}, times an output's largest value if that is above 1" if limited else "not limited"
    return f"lowest cosine {parity.min_cosine:.6f}, largest difference {parity.max_abs_error:.1e} ({limit})"


def bits_per_byte(manifest: contract.Manifest) -> str | None:
    """Return a decoder's bits per byte as text, e.g. "1.6231 against 1.6100 in fp32, on ...". None if they were not measured."""
    decoder = manifest.decoder
    if decoder is None or decoder.bits_per_byte is None or decoder.fp32_bits_per_byte is None:
        return None
    against = "" if manifest.precision == "fp32" else f" against {decoder.fp32_bits_per_byte:.4f} in fp32"
    text = decoder.held_out
    where = "the golden passages" if text is None else f"{text.name} (documents: {text.documents:,}, {_size(text.size_bytes)})"
    return f"{decoder.bits_per_byte:.4f}{against}, on {where}"


def _of_decoder(manifest: contract.Manifest, decoder: contract.Decoder) -> Iterator[tuple[str, str]]:
    if decoder.parameters is not None:
        yield "parameters", f"{decoder.parameters:,}"
    yield "state", f"{_size(decoder.state_bytes)} of memory a sequence, however long, in {len(decoder.states)} tensors"
    cuts = "whole prompts, pieces and single steps, alone and in any batch"
    yield "exactness", f"{cuts}: {'the same bits' if decoder.exact else 'NOT the same bits'}"
    if (bits := bits_per_byte(manifest)) is not None:
        yield "bits per byte", bits
    if (image := decoder.image) is not None:
        yield "draws", f"{', '.join(image.prompts)}: {image.width} x {image.height} pixels in {len(image.level_token_ids)} grey levels"
    if decoder.chat_template is not None:
        yield "chat", decoder.chat_template


def _files(manifest: contract.Manifest) -> Table:
    table = _table("file", "size", "sha256")
    for file in manifest.files:
        table.add_row(escape(file.name), _size(file.size_bytes), file.sha256)
    return table


def _trials(trials: Iterable[contract.RecipeTrial]) -> Table:
    table = _table("int8 recipe", "size", "lowest cosine", "mean", "rank correlation", "texts/s of a core", "over fp32")
    for trial in trials:
        gain = f"{trial.texts_per_s / trial.baseline_texts_per_s:.2f} x"
        ranks = "" if trial.rank_correlation is None else f"{trial.rank_correlation:.4f}"
        figures = [f"{trial.min_cosine:.4f}", f"{trial.mean_cosine:.4f}", ranks, f"{trial.texts_per_s:.0f}", gain]
        table.add_row(escape(trial.recipe), _size(trial.size_bytes), *figures, style="bold" if trial.kept else "dim")
    return table


def _evaluation(evaluation: contract.Evaluation) -> Table:
    metrics = [*evaluation.ways[0].figures]
    table = _table(evaluation.task, *metrics, "embedding space")
    for way in evaluation.ways:
        table.add_row(escape(way.way), *(f"{way.figures.get(metric, float('nan')):.4f}" for metric in metrics), " ".join(way.spaces))
    return table


def _operators(operators: dict[str, int]) -> Table:
    """Return a bar chart of the operators, the most frequent first."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(style="cyan", no_wrap=True)
    most = max(operators.values(), default=1)
    for name, count in sorted(operators.items(), key=lambda item: -item[1]):
        table.add_row(escape(name), str(count), "█" * max(1, round(BAR * count / most)))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(escape(first), no_wrap=True)
    for other in others:
        table.add_column(escape(other), justify="right", overflow="fold")
    return table


def _tensors(tensors: Iterable[contract.Tensor]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype} ({', '.join(map(str, tensor.shape))})" for tensor in tensors)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 100_000 else f"{size_bytes:,} B"
