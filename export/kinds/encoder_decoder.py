"""Exports encoder-decoders, each as two graphs, always in fp32."""

from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from export import contract
from export.checks.encoder_decoder_parity import TOLERANCE, ReaderAndStep, compare_steps
from export.checks.parity import answers, compare, feeds, open_graph, scale, shapes_of
from export.errors import ExportError
from export.graphs.encoder_decoder import graphs_of
from export.graphs.onnx_file import REWRITTEN
from export.graphs.torch_graph import TorchGraph
from export.kinds.exporter import Exporter, Files, Options, Progress
from models.encoder_decoder.checkpoint import ARCHITECTURES, load_encoder_decoder
from models.folders.folder import JsonSettings

LOGIT_ERROR = 1e-3  # limit for the error of golden logits, relative to the largest logit if that is above 1
TOP = 5  # number of logits that are stored for each golden step


class EncoderDecoderExporter(Exporter):
    architectures = tuple(ARCHITECTURES)
    kind = "encoder_decoder"

    def __init__(self, checkpoint: Path, settings: JsonSettings | None, options: Options) -> None:
        super().__init__(checkpoint, settings, options)
        if (options.precision, options.attention, options.held_out, options.maps) != ("fp32", "softmax", None, False):
            raise ExportError(
                "an encoder-decoder is always exported in fp32 and unchanged: leave out precision, attention, held_out and maps"
            )
        self.source = load_encoder_decoder(checkpoint, settings=settings)
        self.config = self.source.model.config
        self.max_tokens, self.vocab_size = self.config.max_source, self.config.vocab_size

    def map_model(self) -> NoReturn:
        raise ExportError(f"{self.source.architecture} has no attention maps: its bundle returns attention weights with every answer")

    def prepare(self) -> None:
        self.token_ids = [self.tokenizer.encode(text).ids for text in self.source.examples]
        for text, ids in zip(self.source.examples, self.token_ids, strict=True):
            if not 0 < len(ids) <= self.max_tokens:
                raise ExportError(
                    f"{self.source.folder}: the example {text!r} has {len(ids)} tokens, not 1 to {self.max_tokens}; correct config.json"
                )

    @cached_property
    def graphs(self) -> dict[str, TorchGraph]:
        return dict(zip((contract.READER, contract.GRAPH), graphs_of(self.source.model), strict=True))

    @property
    def reference(self) -> ReaderAndStep:
        return ReaderAndStep(self.graphs[contract.READER].answer, self.graphs[contract.GRAPH].answer, self.config.begin_token_id)

    def trace(self, scratch: Path) -> Files:
        files = {contract.READER: scratch / "reader.onnx", contract.GRAPH: scratch / "step.onnx"}
        for graph, file in zip(graphs_of(self.source.model, for_onnx=True), files.values(), strict=True):
            graph.export(file, weights_beside=False)
        return files

    def check(self, files: Files, precision: contract.Precision, progress: Progress) -> contract.Parity:
        sessions = {name: open_graph(file) for name, file in files.items()}
        graph = {name: answers(session, self.graphs[name].outputs) for name, session in sessions.items()}
        reader = self.graphs[contract.READER]
        sizes = feeds(reader.inputs, vocab_size=self.vocab_size, pad_token_id=0, max_tokens=self.max_tokens)
        read_error = compare(sessions[contract.READER], reader.answer, reader.outputs, sizes, tolerance=TOLERANCE)
        both = ReaderAndStep(graph[contract.READER], graph[contract.GRAPH], self.config.begin_token_id)
        step_error, cosine = compare_steps(both, self.reference, sizes, vocab_size=self.vocab_size, max_output=self.config.max_output)
        return contract.Parity(max_abs_error=max(read_error, step_error), min_cosine=cosine, shapes=shapes_of(sizes), tolerance=TOLERANCE)

    def golden(self) -> contract.EncoderDecoderGolden:
        ends = {"end_token_id": self.config.end_token_id, "max_output": self.config.max_output}
        written = [self.reference.greedy(ids, **ends) for ids in self.token_ids]
        top = [np.argsort(-logits, axis=1, kind="stable")[:, :TOP] for _, logits in written]
        return contract.EncoderDecoderGolden(
            texts=self.source.examples,
            token_ids=tuple(map(tuple, self.token_ids)),
            outputs=tuple(tuple(tokens) for tokens, _ in written),
            logits=tuple(
                tuple(tuple(map(float, row[ids])) for row, ids in zip(logits, best, strict=True))
                for (_, logits), best in zip(written, top, strict=True)
            ),
            top_token_ids=tuple(tuple(tuple(map(int, ids)) for ids in best) for best in top),
            max_abs_error=LOGIT_ERROR * max(scale(logits) for _, logits in written),
        )

    def optimisation(self) -> str:
        return f"a reader and a step; GRUs as operators of onnxruntime; {REWRITTEN}"

    def fields(self, described: dict[str, contract.Graph]) -> dict[str, Any]:
        return {
            "width": self.vocab_size,
            "source": self.origin(self.source.weights_sha256, getattr(self.config, "score", "softmax")),
            "encoder_decoder": contract.EncoderDecoderFields(
                reader=described[contract.READER],
                begin_token_id=self.config.begin_token_id,
                end_token_id=self.config.end_token_id,
                max_output=self.config.max_output,
                parameters=sum(parameter.numel() for parameter in self.source.model.parameters()),
            ),
        }
