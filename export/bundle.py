"""Exports a checkpoint folder, or a GGUF file, as a bundle: load, trace, optimise, check, then write golden examples and the manifest. The
bundle is written beside the target, which it replaces at the end, so a bundle is complete or absent.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from export import contract
from export.checks.parity import check_interface, open_graph
from export.errors import ExportError
from export.folder import checked_name, files_of, now, replacing, tools
from export.graphs.onnx_file import describe, optimise
from export.kinds.exporter import Exporter, Files, Options, Progress
from export.kinds.load import load
from export.maps.attention_graph import add_attention_graph
from models.checkpoints.description import build_encoder
from models.checkpoints.gguf.file import gguf_file
from models.checkpoints.gguf.unpack import unpack
from models.folders.folder import in_sentences


def export_file(file: Path, out: Path, **how: Any) -> contract.Manifest:
    """Export the encoder that `file` describes; see `models/checkpoints/description.py`. `how` are arguments of `export_bundle`."""
    with TemporaryDirectory() as temporary:
        checkpoint = Path(temporary) / file.stem  # named after `file`, because the manifest records this folder's name
        build_encoder(file, checkpoint)
        return export_bundle(checkpoint, out, **how)


def export_bundle(
    checkpoint: Path,
    out: Path,
    *,
    name: str | None = None,
    progress: Progress = lambda step, fraction: None,
    check_template: Callable[[str], None] = lambda source: None,
    **chosen: Any,
) -> contract.Manifest:
    """Write the bundle `out`, replacing a bundle that exists there, and return its manifest.

    `name` is what clients send as `model`; None: the name of `out`. `progress` is called with a step's name and, in long steps, the
    fraction done. `check_template` is called with the source of a chat template and may raise ExportError. `chosen`: fields of `Options`.

    Raises CheckpointError, CorpusError if `held_out` is a folder but not a data folder, and ExportError. After an error `out` is unchanged.
    """
    options = Options(**chosen)
    with in_sentences(f"{checkpoint} cannot be exported", ExportError):
        name = checked_name(name or out.resolve().name)
        if options.maps and options.precision != "fp32":
            raise ExportError(f"attention maps need an fp32 graph, but precision={options.precision}; leave out --maps or --precision")
        with replacing(out) as folder, TemporaryDirectory(dir=folder) as scratch:
            return _export(checkpoint, options, name, folder, Path(scratch), progress, check_template)


def _export(
    checkpoint: Path, options: Options, name: str, folder: Path, scratch: Path, progress: Progress, check_template: Callable[[str], None]
) -> contract.Manifest:
    progress("load", None)
    if (gguf := gguf_file(checkpoint)) is not None:
        checkpoint, options = scratch / "gguf" / gguf.stem, replace(options, gguf=gguf)
        unpack(gguf, checkpoint)
    exporter = load(checkpoint, replace(options, scratch=scratch))
    if exporter.chat_template is not None:
        check_template(exporter.chat_template)
    model = exporter.map_model() if options.maps else None
    exporter.prepare()
    progress("trace", None)
    traced = exporter.trace(scratch)
    progress("optimise", None)
    graphs = {file: optimise(graph, scratch / Path(file).stem) for file, graph in traced.items()}
    parity = _checked(exporter, graphs, "fp32", progress)
    if options.precision != "fp32":
        graphs = exporter.lower(graphs, scratch, progress)
        parity = _checked(exporter, graphs, options.precision, progress)
    golden = exporter.golden()

    progress("write", None)
    for file, graph in graphs.items():
        for part in graph.parent.glob(f"{graph.name}*"):  # weights may be in a second file
            part.rename(folder / part.name.replace(graph.name, file))
    for path in exporter.copied():
        shutil.copyfile(path, folder / path.name)
    for file, text in exporter.texts().items():
        (folder / file).write_text(text, encoding="utf-8")
    (folder / contract.GOLDEN).write_text(golden.model_dump_json(), encoding="utf-8")
    more: dict[str, Any] = {"short_graph": exporter.short_graph(folder, scratch)}
    if model is not None:
        progress("maps", None)
        sizes = {"max_tokens": exporter.map_tokens, "vocab_size": exporter.vocab_size}
        more["attention_graph"] = add_attention_graph(model, folder, scratch, **sizes)
    if options.gpu:
        progress("gpu", None)
        more["gpu_graph"] = exporter.gpu_graph(folder / contract.GPU_GRAPH)
    manifest = _manifest(exporter, name, folder, parity=parity, **more)
    (folder / contract.MANIFEST).write_text(contract.dump(manifest), encoding="utf-8")
    return manifest


def _checked(exporter: Exporter, graphs: Files, precision: contract.Precision, progress: Progress) -> contract.Parity:
    """Compare the graphs with torch and return the differences. Raises ExportError for the first difference above its limit."""
    progress("check", None)
    for file, graph in graphs.items():
        check_interface(open_graph(graph), exporter.graphs[file].inputs, exporter.graphs[file].outputs)
    return exporter.check(graphs, precision, progress)


def _manifest(exporter: Exporter, name: str, folder: Path, **measured: Any) -> contract.Manifest:
    """Return the manifest of the bundle in `folder`, whose other files are already written. `measured` are fields of it."""
    how = exporter.optimisation()
    described = {file: describe(folder / file, graph.inputs, graph.outputs, how) for file, graph in exporter.graphs.items()}
    return contract.Manifest(
        name=name,
        kind=exporter.kind,
        precision=exporter.options.precision,
        files=files_of(folder),
        graph=described[contract.GRAPH],
        limits=contract.Limits(max_tokens=exporter.max_tokens, vocab_size=exporter.vocab_size),
        created=now(),
        tool=tools(),
        **measured,
        **exporter.fields(described),
    )
