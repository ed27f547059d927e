"""What the encoder-decoders have in common: steps equal the whole, padding and company make no difference; and what is Bahdanau's own."""

import math

import pytest
import torch

from models.encoder_decoder.config import RecurrentConfig, TransformerConfig
from models.encoder_decoder.recurrent import RecurrentEncoderDecoder
from tests.models.encoder_decoder.tiny import KINDS, RECURRENT, TRANSFORMER, VOCABULARY, sources, tiny

TOLERANCE = 1e-10  # float64
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_steps_give_the_logits_of_the_whole_and_weights_that_sum_to_one(kind: str) -> None:
    model, (source, mask) = tiny(kind), sources(7, 3, 1)
    previous = torch.randint(3, 11, (3, model.config.max_output), generator=torch.Generator().manual_seed(3))
    whole = model(source, mask, previous)
    memory, state = model.read(source, mask)
    for t, token in enumerate(previous.unbind(1)):
        logits, state, weights = model.step(token, state, memory, mask)
        torch.testing.assert_close(logits, whole[:, t], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=torch.float64), atol=TOLERANCE, rtol=0)
        assert not weights[~mask].any()


@each_kind
def test_a_row_is_the_same_alone_and_what_stands_at_padding_makes_no_difference(kind: str) -> None:
    model, (source, mask), previous = tiny(kind), sources(7, 3), torch.tensor([[1, 5, 6], [1, 7, 8]])
    together = model(source, mask, previous)
    alone = model(source[1:, :3], mask[1:, :3], previous[1:])
    torch.testing.assert_close(together[1:], alone, atol=TOLERANCE, rtol=0)
    other = torch.where(mask, source, 9)
    torch.testing.assert_close(model(other, mask, previous), together, atol=TOLERANCE, rtol=0)


@each_kind
def test_the_future_does_not_change_the_past(kind: str) -> None:
    model, (source, mask) = tiny(kind), sources(5)
    one, other = (model(source, mask, torch.tensor([[1, 5, 6, last]])) for last in (7, 8))
    torch.testing.assert_close(one[:, :3], other[:, :3], atol=TOLERANCE, rtol=0)
    assert not torch.allclose(one[:, 3], other[:, 3])


@each_kind
def test_gradients_reach_every_parameter(kind: str) -> None:
    model, (source, mask) = tiny(kind), sources(5, 4)
    model(source, mask, torch.tensor([[1, 5, 6], [1, 7, 8]])).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


@each_kind
def test_an_empty_source_is_finite(kind: str) -> None:
    model = tiny(kind)
    nothing = torch.zeros(1, 3, dtype=torch.int64)
    assert model(nothing, nothing.bool(), torch.tensor([[1, 5]])).isfinite().all()


@torch.no_grad()
def test_dense_loop_of_bahdanaus_model() -> None:
    """Encoder, score, softmax, context and readout, written out for one row in Python's numbers and torch's own GRU cell."""
    model, (source, mask), previous = tiny("additive"), sources(4), [1, 5, 6]
    assert isinstance(model, RecurrentEncoderDecoder)
    x = model.embedding(source[0])

    def read(gru: torch.nn.GRU, order: list[int]) -> dict[int, torch.Tensor]:
        cell = torch.nn.GRUCell(5, 4).double()
        cell.load_state_dict({name: gru.get_parameter(f"{name}_l0") for name in cell.state_dict()})
        h, at = torch.zeros(4, dtype=torch.float64), {}
        for t in order:
            h = at[t] = cell(x[t], h)
        return at

    ahead, back = read(model.forwards, [0, 1, 2, 3]), read(model.backwards, [3, 2, 1, 0])
    h = [torch.cat([ahead[t], back[t]]) for t in range(4)]
    s = torch.tanh(model.to_state(back[0]))
    want = []
    for token in previous:
        e = [float(model.score.w_v @ torch.tanh(model.score.from_state(s) + model.score.from_memory(each))) for each in h]
        total = sum(math.exp(each) for each in e)
        c = sum((math.exp(score) / total) * each for score, each in zip(e, h, strict=True))
        s = model.cell(model.cell.from_y(model.embedding.weight[token])[None], c[None], s[None])[0]
        want.append(model.to_logits(torch.cat([s, c])))
    torch.testing.assert_close(model(source, mask, torch.tensor([previous]))[0], torch.stack(want), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"score": "cosine"}, "score='cosine'"),
        ({"score": "dot", "d_state": 7}, "d_state=7"),
        ({"begin_token_id": 11}, "begin_token_id=11"),
        ({"max_output": 0}, "max_output=0"),
    ],
)
def test_a_shape_that_cannot_be_is_named(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RecurrentConfig(**(VOCABULARY | RECURRENT | changes))


@torch.no_grad()
def test_the_papers_model_is_torchs() -> None:
    """Embeddings times sqrt(D) plus sinusoids, then `torch.nn.Transformer`: post-norm, ReLU, biases."""
    model, (source, mask), previous = tiny("transformer of the paper"), sources(7, 4), torch.tensor([[1, 5, 6, 3], [1, 7, 8, 3]])
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    theirs = torch.nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True, dtype=torch.float64)
    theirs.encoder.norm = theirs.decoder.norm = None  # the paper has no norm after the last block
    theirs.load_state_dict(
        _as_torchs("encoder", model.encoder.blocks, {"self_attn": "attention"}, ("attention_norm", "feedforward_norm"))
        | _as_torchs(
            "decoder", model.blocks, {"self_attn": "own", "multihead_attn": "cross"}, ("own_norm", "cross_norm", "feedforward_norm")
        )
    )
    waves = torch.tensor([[wave(t / 10_000 ** (2 * i / 8)) for i in range(4) for wave in (math.sin, math.cos)] for t in range(7)])
    x, y = (
        math.sqrt(8) * torch.nn.functional.embedding(ids, table.weight) + waves[: ids.shape[1]].double()
        for ids, table in ((source, model.encoder.embeddings.tokens), (previous, model.embedding))
    )
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    h = theirs(x, y, tgt_mask=future, src_key_padding_mask=~mask, memory_key_padding_mask=~mask)
    torch.testing.assert_close(model(source, mask, previous), model.to_logits(h), atol=TOLERANCE, rtol=0)


def _as_torchs(part: str, blocks: torch.nn.ModuleList, attentions: dict[str, str], norms: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the tensors of our blocks under the names of torch's layers."""
    state = {}
    pairs = {f"norm{i + 1}": norm for i, norm in enumerate(norms)} | {"linear1": "feedforward.up", "linear2": "feedforward.down"}
    pairs |= {f"{theirs}.out_proj": f"{ours}.to_out" for theirs, ours in attentions.items()}
    for i, block in enumerate(blocks):
        for kind in ("weight", "bias"):
            for theirs, ours in attentions.items():
                projections = [block.get_parameter(f"{ours}.{to}.{kind}") for to in ("to_q", "to_k", "to_v")]
                state[f"{part}.layers.{i}.{theirs}.in_proj_{kind}"] = torch.cat(projections)
            state |= {f"{part}.layers.{i}.{theirs}.{kind}": block.get_parameter(f"{ours}.{kind}") for theirs, ours in pairs.items()}
    return state


@pytest.mark.parametrize("changes", [{"norm": "both"}, {"activation": "sine"}, {"positions": "nowhere"}])
def test_a_block_that_there_is_not_is_named(changes: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(changes.values()))):
        tiny("transformer", **changes)


def test_heads_of_an_odd_width_are_refused() -> None:
    with pytest.raises(ValueError, match="d_model=9"):
        TransformerConfig(**(VOCABULARY | TRANSFORMER | {"d_model": 9}))
