"""The encoder and what is built on it: configuration, shapes, padding, and a graph that leaves B and N free."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models.encoder.heads import Dense, SentenceEncoder, SequenceClassifier, TokenClassifier
from models.encoder.model import Encoder, EncoderConfig
from models.encoder.pooling import POOLINGS
from tests.cases import in_one_test

EXACT = 1e-10  # float64: the same formula, summed in another order
ROUNDED = 1e-5  # float32: 24 bits, a few layers, values of a few units

CONFIG = EncoderConfig(vocab_size=30, d_model=12, n_layers=2, n_heads=3, d_feedforward=20, n_positions=40)

# One of each kind of encoder that the families need.
CONFIGS = {
    "bert": replace(CONFIG, n_token_types=2),
    "roberta": replace(CONFIG, position_padding_id=1, n_token_types=1),
    "mpnet": replace(CONFIG, position_padding_id=1, n_relative_buckets=32),
    "modernbert": replace(CONFIG, positions="rotary", windows=(None, 2), local_rotary_base=50.0, norm="pre", final_norm=True, gated=True),
    "nomic": replace(CONFIG, positions="rotary", d_head=6, n_token_types=2, gated=True, activation="silu"),
    "albert": replace(CONFIG, n_token_types=2, d_embedding=5, shared_layers=True, n_layers=3),
    "sinusoidal": replace(CONFIG, positions="sinusoidal", embedding_norm=False, norm="pre"),
    "no-positions": replace(CONFIG, positions="none", activation="relu"),
    "gated-units": replace(CONFIG, attention="gau", d_feedforward=0, norm="pre", embedding_norm=False),
    **{f"bert-{name}": replace(CONFIG, attention=name) for name in ("narrow", "wide", "linear")},
}

every_encoder = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def make(config: EncoderConfig, dtype: torch.dtype = torch.float64) -> Encoder:
    torch.manual_seed(0)
    encoder = Encoder(config, dtype=dtype).eval()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    return encoder


def batch(*lengths: int, N: int | None = None, pad_id: int = 1) -> tuple[Tensor, Tensor]:
    """Random ids of the given lengths, right-padded to N, and their mask, int64."""
    mask = torch.arange(N or max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 30, mask.shape, generator=torch.Generator().manual_seed(0))
    return torch.where(mask, ids, pad_id), mask.long()


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_gated_units_may_stand_without_feedforward_layers(norm: str) -> None:
    """They are a block each: all that a block has is its unit and one norm."""
    encoder = make(replace(CONFIGS["gated-units"], norm=norm))
    ids, mask = batch(9)
    x = encoder.embeddings(ids, torch.arange(9), None)
    for block in encoder.blocks:
        unit, norm_ = block.attention, block.attention_norm
        x = x + unit(norm_(x), mask != 0) if norm == "pre" else norm_(x + unit(x, mask != 0))
    assert (encoder(ids, mask) - x).abs().max() <= EXACT
    assert not any("feedforward" in name for name in encoder.state_dict())


@every_encoder
def test_padding_and_neighbours_change_nothing(config: EncoderConfig) -> None:
    encoder = make(config)
    ids, mask = batch(5, 9, 1)
    x = encoder(ids, mask)
    assert x.shape == (3, 9, 12)
    alone = encoder(ids[:1, :5], mask[:1, :5])
    assert (x[0, :5] - alone[0]).abs().max() <= EXACT


@every_encoder
@in_one_test("pooling", [*POOLINGS, "none"])
def test_a_sentence_encoder_gives_zero_for_no_tokens_and_unit_length_for_some(config: EncoderConfig, pooling: str) -> None:
    model = SentenceEncoder(make(config), pooling=pooling)
    ids, mask = batch(4, 0, 6)
    out = model(ids, mask)
    assert torch.equal(out.token_embeddings[mask == 0], torch.zeros(int((mask == 0).sum()), 12).double())
    assert torch.isfinite(out.token_embeddings).all()
    if pooling == "none":
        assert out.embedding is None
        return
    assert torch.equal(out.embedding[1], torch.zeros(12))
    torch.testing.assert_close(out.embedding.norm(dim=1), torch.tensor([1.0, 0.0, 1.0]).double())
    torch.testing.assert_close(out.embedding[0] * out.pooled[0].norm(), out.pooled[0])


class EveryPooling(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return tuple(pool(x, mask) for pool in POOLINGS.values())


def test_every_pooling_exports() -> None:
    B, N = torch.export.Dim("B"), torch.export.Dim("N", max=40)
    x, mask, axes = torch.randn(3, 9, 12), batch(3, 0, 9)[1] != 0, {0: B, 1: N}
    program = torch.export.export(EveryPooling(), (torch.randn(2, 6, 12), batch(6, 4)[1] != 0), dynamic_shapes=(axes, axes)).module()
    for ours, exported in zip(EveryPooling()(x, mask), program(x, mask), strict=True):
        assert (ours - exported).abs().max() <= ROUNDED


def test_too_many_tokens_are_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match="N=41 tokens, but the model has n_positions=40"):
        make(CONFIG)(*batch(41))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 100, "n_heads": 8}, "d_model=100 is not divisible by n_heads=8"),
        ({"n_layers": 0}, "n_layers=0 must be at least 1"),
        ({"d_feedforward": -1}, "d_feedforward=-1 must be at least 0"),
        ({"attention": "magic"}, "attention='magic' is not one of softmax, narrow, wide, dot, "),
        ({"attention": "causal_linear"}, "attention='causal_linear' is not one of softmax, narrow, wide, dot, "),
        ({"activation": "swoosh"}, "activation='swoosh' is not one of gelu"),
        ({"positions": "absolute"}, "positions='absolute' is not one of"),
        ({"norm": "between"}, "norm='between' is not one of post, pre"),
        ({"windows": (3,)}, "windows has 1 entries for n_layers=2"),
        ({"positions": "rotary", "position_padding_id": 1}, "position_padding_id=1 needs learned positions"),
        ({"attention_options": {"window": 3}}, "attention_options of softmax has 'window', which is not one of none"),
        ({"attention": "linear", "positions": "rotary"}, "attention='linear' does not support rotary positions"),
        ({"attention": "linear", "windows": (None, 3)}, "does not support local windows"),
        ({"attention": "linear", "n_relative_buckets": 32}, "does not support a relative position bias"),
        ({"d_embedding": 0}, "d_embedding=0 must be at least 1"),
        ({"shared_layers": True, "norm": "pre"}, "shared_layers needs norm='post' and no windows"),
        ({"shared_layers": True, "windows": (None, 2)}, "shared_layers needs norm='post' and no windows"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


def test_heads_refuse_what_they_do_not_know() -> None:
    encoder = Encoder(CONFIG)
    with pytest.raises(ValueError, match="pooling='median' is not one of cls"):
        SentenceEncoder(encoder, pooling="median")
    with pytest.raises(ValueError, match="activation='swoosh'"):
        Dense(3, 4, activation="swoosh")
    with pytest.raises(ValueError, match="n_labels=0"):
        SequenceClassifier(encoder, n_labels=0, pooling="cls", transform=Dense(12, 12))
    with pytest.raises(ValueError, match="n_labels=0"):
        TokenClassifier(encoder, n_labels=0)
