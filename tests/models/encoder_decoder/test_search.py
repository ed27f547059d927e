"""Greedy and beam against all outputs there are, tried one by one."""

from itertools import product

import pytest
import torch

from models.encoder_decoder.model import EncoderDecoder
from models.encoder_decoder.search import attended, beam, greedy
from tests.cases import in_one_test
from tests.models.encoder_decoder.tiny import KINDS, sources, tiny

V, T, END = 5, 3, 2
TOLERANCE = 1e-5  # log p is kept in float32


def model_of(kind: str) -> EncoderDecoder:
    """Five tokens, three outputs, and logits far apart: 3 + 4 * 4 and more outputs, of which one is the best."""
    model = tiny(kind, vocab_size=V, max_output=T)
    with torch.no_grad():
        model.to_logits.weight.mul_(4)
    return model


@torch.no_grad()
def all_outputs(model: EncoderDecoder, source: torch.Tensor, mask: torch.Tensor) -> dict[tuple[int, ...], float]:
    """log p of every output: to its end, or cut off after T tokens."""
    found = {}
    for tokens in product(range(V), repeat=T):
        ended = tokens.index(END) + 1 if END in tokens else T
        output = tokens[:ended]
        if output not in found:
            previous = torch.tensor([[model.config.begin_token_id, *output[:-1]]])
            log_p = torch.log_softmax(model(source, mask, previous), dim=-1)[0]
            found[output] = float(sum(log_p[t, token] for t, token in enumerate(output)))
    return found


def cut(tokens: torch.Tensor) -> tuple[int, ...]:
    listed = tokens.tolist()
    return tuple(listed[: listed.index(END) + 1] if END in listed else listed)


@in_one_test("kind", KINDS)
def test_a_beam_as_wide_as_all_there_is_finds_the_best(kind: str) -> None:
    model, (ids, mask) = model_of(kind), sources(4, 2)
    ids = ids % V
    found = beam(model, ids, mask, width=V**T)
    for row in range(2):
        n = int(mask[row].sum())
        outputs = all_outputs(model, ids[row : row + 1, :n], mask[row : row + 1, :n])
        best = max(outputs, key=lambda output: outputs[output] / len(output))
        assert cut(found.tokens[row]) == best
        assert float(found.log_p[row]) == pytest.approx(outputs[best], abs=TOLERANCE)


@in_one_test("kind", KINDS)
def test_a_beam_of_one_is_greedy_and_log_p_is_that_of_the_output(kind: str) -> None:
    model, (ids, mask) = model_of(kind), sources(4, 2)
    ids = ids % V
    one, other = greedy(model, ids, mask), beam(model, ids, mask, width=1)
    assert [cut(row) for row in one.tokens] == [cut(row) for row in other.tokens]
    torch.testing.assert_close(one.log_p.float(), other.log_p.float(), atol=TOLERANCE, rtol=0)
    outputs = all_outputs(model, ids[:1], mask[:1])
    assert float(one.log_p[0]) == pytest.approx(outputs[cut(one.tokens[0])], abs=TOLERANCE)


def test_length_power_prefers_long_or_short() -> None:
    model, (ids, mask) = model_of("additive"), sources(4)
    ids = ids % V
    outputs = all_outputs(model, ids, mask)
    for power in (0.0, 3.0):
        found = beam(model, ids, mask, width=V**T, length_power=power)
        assert cut(found.tokens[0]) == max(outputs, key=lambda output, power=power: outputs[output] / len(output) ** power)


@in_one_test("kind", KINDS)
def test_what_an_output_was_written_from(kind: str) -> None:
    model, (source, mask) = tiny(kind), sources(5, 3)
    tokens, weights = attended(model, source, mask)
    assert tokens.equal(greedy(model, source, mask).tokens)
    assert weights.shape == (*tokens.shape, 5)
    torch.testing.assert_close(weights.sum(2), torch.ones_like(weights[:, :, 0]))
