"""A random encoder-decoder of torch in the place of the two graphs, that can be held and broken."""

import threading
from collections.abc import Sequence

import torch

from export import contract
from models.encoder_decoder.model import EncoderDecoder
from service.encoder_decoder.session import EncoderDecoderSession, Ids, Rows, Step
from service.runtime.onnx import pad
from tests.service.fakes import PATIENCE_S


class TorchSession(EncoderDecoderSession):
    """`sizes` are the (R, N) of all steps; `hold` keeps steps from beginning until `open`."""

    def __init__(self, model: EncoderDecoder) -> None:
        c = model.config
        self.model, self.vocab_size, self.max_source = model, c.vocab_size, c.max_source
        graph = contract.Graph(file="reader.onnx", opset=20, inputs=(), outputs=(), operators={}, optimisation="none")
        self.both = contract.EncoderDecoderFields(
            reader=graph, begin_token_id=c.begin_token_id, end_token_id=c.end_token_id, max_output=c.max_output, parameters=0
        )
        self.sizes: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.arrived = threading.Event()  # a step waits to begin
        self._gate = threading.Event()
        self._gate.set()

    def hold(self) -> None:
        self.arrived.clear()
        self._gate.clear()

    def open(self) -> None:
        self._gate.set()

    def read(self, sources: Sequence[list[int]]) -> Rows:
        ids, mask, _ = pad(sources, None, 0)
        with torch.inference_mode():
            memory, state = self.model.read(torch.from_numpy(ids), torch.from_numpy(mask) != 0)
        return Rows(mask, *({name: each.float().numpy() for name, each in tensors.items()} for tensors in (memory, state)))

    def step(self, previous: Ids, rows: Rows) -> Step:
        self.arrived.set()
        assert self._gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.sizes.append(rows.mask.shape)
        state, memory = ({name: torch.from_numpy(each) for name, each in tensors.items()} for tensors in (rows.state, rows.memory))
        with torch.inference_mode():
            logits, new, weights = self.model.step(torch.from_numpy(previous), state, memory, torch.from_numpy(rows.mask) != 0)
        return Step(logits.numpy(), weights.numpy(), {name: each.numpy() for name, each in new.items()})
