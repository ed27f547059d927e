"""The parallel forms over whole texts compute what the layers compute, and their gradients are those of the layers too."""

import copy

import pytest
import torch

from models.decoder.model import Decoder
from models.decoder.window import hybrid, windowed
from models.distillation.decoder.parallel import hidden_states, in_parallel, part_length
from tests.decoders import random_decoder

EXACT, CLOSE = 1e-10, 1e-5  # float64 and float32: the same formula, summed in another order
TEACHER = {"layers": "causal_softmax", "n_layers": 2, "n_heads": 4, "layer_options": {"causal_softmax": {"n_kv_heads": 2}}}
WINDOW, FIRST = 12, 2


def student(whole: Decoder, *, window: int = WINDOW, n_first: int = FIRST) -> Decoder:
    """With maps so far from their beginning that every number of them shows."""
    torch.manual_seed(0)
    model = hybrid(whole, window, {"n_first": n_first, "piece": window - 1})
    for block in model.blocks:
        for parameter in [*block.layer.phi_q.parameters(), *block.layer.phi_k.parameters()]:
            torch.nn.init.normal_(parameter, std=0.7)
    return model.to(whole.embedding.weight.dtype)


def texts(N: int) -> torch.Tensor:
    return torch.randint(256, (2, N), generator=torch.Generator().manual_seed(N))


def logits(decoder: Decoder, ids: torch.Tensor, **options: object) -> torch.Tensor:
    return hidden_states(in_parallel(copy.deepcopy(decoder), **options), ids) @ decoder.embedding.weight.T


@pytest.mark.parametrize("N", [1, 2, 11, 12, 13, 24, 50, 61])
@pytest.mark.parametrize("fused", [False, True], ids=["products", "fused"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, CLOSE)], ids=["float64", "float32"])
@torch.no_grad()
def test_the_parallel_forms_compute_what_the_layers_do(N: int, fused: bool, dtype: torch.dtype, tolerance: float) -> None:
    whole = random_decoder(**TEACHER).to(dtype)
    for model in (student(whole), student(whole, window=7, n_first=1), windowed(whole, WINDOW), whole):
        expected = model(texts(N))[0]
        found = logits(model, texts(N), fused=dtype if fused else None)
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"fused": torch.float64}], ids=["products", "recompute", "fused"])
def test_the_gradients_are_those_of_the_layers(options: dict[str, object]) -> None:
    model = student(random_decoder(**TEACHER).double())
    drawn = torch.randn(2, 50, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, found = {}, {}
    for gradients, run in ((expected, lambda: model(texts(50))[0]), (found, lambda: logits_of_same(model, texts(50), options))):
        model.zero_grad()
        (run() * drawn).sum().backward()
        gradients |= {name: parameter.grad.clone() for name, parameter in model.named_parameters() if ".layer." in name}
    assert any("phi_k" in name for name in expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        assert (found[name] - gradient).abs().max() <= 1e-8 * gradient.abs().max(), name


def logits_of_same(model: Decoder, ids: torch.Tensor, options: dict[str, object]) -> torch.Tensor:
    """The logits of the parallel form of a copy that has the parameters of the model themselves."""
    memo = {id(parameter): parameter for parameter in model.parameters()}
    return hidden_states(in_parallel(copy.deepcopy(model, memo), **options), ids) @ model.embedding.weight.T


def test_bfloat16_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: projections and near tokens in bfloat16."""
    model = student(random_decoder(**TEACHER))
    with torch.no_grad():
        expected = model(texts(61))[0]
        with torch.autocast("cpu", torch.bfloat16):
            found = logits(model, texts(61), fused=torch.bfloat16)
    assert (found - expected).abs().mean() < 0.03 * expected.abs().mean()


def test_a_layer_without_a_parallel_form_is_refused() -> None:
    with pytest.raises(ValueError, match="CausalLinearAttention has no parallel form here"):
        in_parallel(random_decoder())


def test_parts_divide_the_recent_tokens() -> None:
    assert [part_length(L) for L in (252, 1_020, 10, 8, 251)] == [84, 68, 10, 8, 251]
