"""Bits per byte: every token once, whatever the chunks, the batch and the company."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from models.decoder.model import Decoder, DecoderConfig
from models.training.corpus import TokenDocument
from models.training.text import evaluation
from models.training.text.evaluation import evaluate, first

V = 32
TOLERANCE = 1e-5  # relative: sums in another order
LAYERS = ("causal_linear", "gated_delta", "causal_softmax")


class Uniform(nn.Module):
    """Knows nothing: every token has the same chance. Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.asked = 0

    def forward(self, tokens, lengths=None, states=None, positions=None, wanted=None):
        self.asked += int(lengths.sum())
        return torch.zeros(*tokens.shape, V), []


def document(length: int, *, package: str = "p", size_bytes: int = 100, seed: int = 0) -> TokenDocument:
    tokens = np.random.default_rng(seed).integers(1, V, length).astype(np.uint16)
    tokens[-1] = 0
    return TokenDocument(package=package, file=f"{seed}.py", size_bytes=size_bytes, tokens=tokens)


def decoder(layers: str, **positions: object) -> Decoder:
    torch.manual_seed(0)
    positions = positions or {"positions": "none" if layers == "gated_delta" else "rotary"}
    model = Decoder(DecoderConfig(vocab_size=V, d_model=16, n_layers=2, n_heads=2, d_feedforward=32, layers=layers, **positions))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(10)  # so that the past matters
    return model


def test_a_model_that_knows_nothing_needs_log2_v_bits_a_token() -> None:
    documents = [
        document(300, package="a", size_bytes=900),
        document(7, package="b", size_bytes=10, seed=1),
        document(1, package="b", size_bytes=3),
    ]
    for context in (None, 16):
        model = Uniform()
        found = evaluate(model, documents, end_of_text=0, context=context)
        assert model.asked == found.n_tokens == 308
        assert found.size_bytes == 913
        assert found.overall == pytest.approx(308 * math.log2(V) / 913)
        assert found.packages == pytest.approx({"a": 300 * math.log2(V) / 900, "b": 8 * math.log2(V) / 13})


@pytest.mark.parametrize("layers", LAYERS)
def test_carried_on_in_chunks_is_the_whole_document_at_once(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition: one document, one call, the sum of -log2 of the chances of its tokens."""
    documents = [document(n, seed=n) for n in (50, 33, 17, 1, 49)]
    model = decoder(layers)
    bits = 0.0
    for d in documents:
        tokens = torch.from_numpy(np.concatenate([[0], d.tokens]).astype(np.int64))
        chances = model(tokens[None, :-1])[0][0].double().log_softmax(dim=-1)
        bits -= chances[torch.arange(len(d.tokens)), tokens[1:]].sum().item() / math.log(2)
    for chunk, rows, row_tokens in ((16, 16, 1000), (7, 2, 1000), (64, 1, 1000), (16, 16, 60)):
        monkeypatch.setattr(evaluation, "CHUNK", chunk)
        monkeypatch.setattr(evaluation, "ROWS", rows)
        monkeypatch.setattr(evaluation, "ROW_TOKENS", row_tokens)
        assert evaluate(model, documents, end_of_text=0).overall == pytest.approx(bits / 500, rel=TOLERANCE)


def test_windows_forget_what_lies_before_them() -> None:
    """A window is a document of its own that begins with the token before it; in the first one that is <|endoftext|>."""
    model, whole = decoder("causal_linear"), document(40, size_bytes=1)
    bits = 0.0
    for start in (0, 16, 32):
        before = 0 if start == 0 else int(whole.tokens[start - 1])
        part = TokenDocument(package="p", file="f", size_bytes=1, tokens=whole.tokens[start : start + 16])
        bits += evaluate(model, [part], end_of_text=before).overall
    assert evaluate(model, [whole], end_of_text=0, context=16).overall == pytest.approx(bits, rel=TOLERANCE)
    assert evaluate(model, [whole], end_of_text=0).overall != pytest.approx(bits, rel=TOLERANCE)


def test_a_model_in_training_stays_in_training() -> None:
    model = decoder("causal_linear").train()
    evaluate(model, [document(5)], end_of_text=0)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_first_documents_up_to_a_size() -> None:
    documents = [document(5, size_bytes=size) for size in (60, 50, 40, 30)]
    assert [d.size_bytes for d in first(documents, 100)] == [60, 40]
    assert [d.size_bytes for d in first(documents, 1)] == [60]
