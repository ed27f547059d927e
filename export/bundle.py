"""A checkpoint folder becomes a bundle: load, trace, optimise, check, and only then a directory that anyone may open.

Everything is written to a hidden directory beside the target, which takes the target's name in one step at the end. So a bundle is
complete or absent, and a broken export leaves the bundle before it in place.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from export import contract
from export.errors import ExportError
from export.golden import TEXTS, Examples, Tokens
from export.graph import OPTIMISATION, describe, inputs_of, optimise, outputs_of, run_torch, trace
from export.parity import FP32_TOLERANCE, Arrays, Feed, check_interface, compare, feeds, open_graph, scale
from models.checkpoint import Checkpoint, load_checkpoint

Progress = Callable[[str, float | None], None]

# What a server may find on start, on its own processor: another order of summation, and nothing more.
GOLDEN_MIN_COSINE = 0.9999
GOLDEN_LOGIT_ERROR = 1e-3  # relative to the largest golden logit where that is above 1


def export_bundle(
    checkpoint: Path,
    out: Path,
    *,
    name: str | None = None,
    precision: contract.Precision = "fp32",
    attention: str = "softmax",
    min_cosine: float = 0.99,
    progress: Progress = lambda step, fraction: None,
) -> contract.Manifest:
    """Write the bundle `out`, in the place of a bundle that is there already, and return its manifest.

    `min_cosine` is what an int8 graph must reach on every text. `progress` is told each step as it begins, and how far the long ones are
    (0 to 1). Raises CheckpointError for the folder, ExportError for everything after it; then `out` is as it was.
    """
    bundle_name = name or _name_of(checkpoint)
    with replacing(out) as folder, _scratch(folder) as scratch:
        progress("load", None)
        source = load_checkpoint(checkpoint, attention=attention)
        inputs, outputs = inputs_of(source), outputs_of(source)
        reference = torch_reference(source)

        progress("trace", None)
        trace(source, scratch / "traced.onnx")
        progress("optimise", None)
        optimise(scratch / "traced.onnx", folder / contract.GRAPH)

        progress("check", None)
        session = open_graph(folder / contract.GRAPH)
        check_interface(session, inputs, outputs)
        sizes = feeds(inputs, vocab_size=source.config.vocab_size, pad_token_id=source.pad_token_id, max_tokens=source.max_tokens)
        error = compare(session, reference, outputs, sizes)
        examples = Examples(source.kind, Tokens(source.tokenizer_file, source.max_tokens), inputs, reference, TEXTS)
        cosine = float(examples.cosines(examples.run(graph_answers(session, outputs))).min())

        progress("write", None)
        shutil.copyfile(source.tokenizer_file, folder / contract.TOKENIZER)
        golden = contract.Golden(
            texts=examples.texts,
            pairs=examples.pairs,
            outputs=tuple(tuple(map(float, row)) for row in examples.rows),
            min_cosine=GOLDEN_MIN_COSINE if source.kind == "encoder" else None,
            max_abs_error=None if source.kind == "encoder" else GOLDEN_LOGIT_ERROR * scale(examples.rows),
        )
        (folder / contract.GOLDEN).write_text(golden.model_dump_json(), encoding="utf-8")
        manifest = contract.Manifest(
            name=bundle_name,
            kind=source.kind,
            precision=precision,
            files=files_of(folder),
            graph=describe(folder / contract.GRAPH, inputs, outputs, OPTIMISATION),
            limits=contract.Limits(max_tokens=source.max_tokens, vocab_size=source.config.vocab_size),
            source=source_of(source),
            parity=contract.Parity(
                max_abs_error=error,
                min_cosine=cosine,
                shapes=tuple(feed[contract.ATTENTION_MASK].shape for feed in sizes),
                tolerance=FP32_TOLERANCE,
            ),
            pooling=source.pooling,
            normalized=source.normalized,
            width=int(outputs[0].shape[-1]),
            pad_token_id=source.pad_token_id,
            prompts=source.prompts,
            default_prompt=source.default_prompt,
            id2label=source.id2label,
            score_activation=source.score_activation,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tool=tool(),
        )
        (folder / contract.MANIFEST).write_text(contract.dump(manifest), encoding="utf-8")
    return manifest


def torch_reference(source: Checkpoint):
    def answer(feed: Feed) -> Arrays:
        values = run_torch(source, {name: torch.from_numpy(value) for name, value in feed.items()})
        return {name: value.float().numpy() for name, value in values.items()}

    return answer


def graph_answers(session, outputs):
    names = [tensor.name for tensor in outputs]
    return lambda feed: dict(zip(names, session.run(names, feed), strict=True))


def source_of(source: Checkpoint) -> contract.Source:
    weights = sorted(source.tokenizer_file.parent.glob("*.safetensors"))
    digests = [contract.sha256(file) for file in weights]
    return contract.Source(
        architecture=source.architecture,
        checkpoint=source.folder.resolve().name,
        weights_sha256=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
        attention=source.config.attention,
        untrained=source.untrained,
    )


def files_of(folder: Path) -> tuple[contract.File, ...]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return tuple(contract.File(name=path.name, sha256=contract.sha256(path), size_bytes=path.stat().st_size) for path in files)


def tool() -> str:
    """What wrote the bundle."""
    return ", ".join(f"{package} {_version(package)}" for package in ("attnserve", "torch", "onnx", "onnxruntime"))


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A new directory that becomes `out` when the block ends well, and is removed when it does not, Ctrl-C included.

    Raises ExportError when `out` is something other than a bundle or an empty directory: it would be lost.
    """
    if out.exists() and not (out.is_dir() and ((out / contract.MANIFEST).is_file() or not any(out.iterdir()))):
        raise ExportError(f"{out} exists and is not a bundle; choose another --out, or move it away")
    out.parent.mkdir(parents=True, exist_ok=True)
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{part}") for part in ("new", "old"))
    new.mkdir()
    try:
        yield new
        if out.exists():
            out.rename(old)
        new.rename(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    scratch = folder / "scratch"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)


def _name_of(checkpoint: Path) -> str:
    name = checkpoint.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ExportError(f"the folder name {name!r} does not do as the name of a model; give one with --name")
    return name


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from source"
