"""What is learned of the price of a call, and what a prompt's pieces are made of it."""

import random

import pytest

from service.runtime.price import Price


def learned(sizes: list[int], *, call_s: float = 0.0015, token_s: float = 0.0001, stalls: float = 0.0) -> Price:
    price, dice = Price(), random.Random(0)
    for at, size in enumerate(sizes):
        stalled = 30 if at and dice.random() < stalls else 1
        price.paid(size, (call_s + token_s * size) * dice.uniform(0.95, 1.05) * stalled)
    return price


def test_calls_of_one_token_do_not_make_a_long_prompt_dear() -> None:
    """Seconds a token, without the price of a call, would say 0.48 s."""
    assert learned([1] * 12).of(300) < 2 * (0.0015 + 0.03)


@pytest.mark.parametrize("call_s", [0.0005, 0.0015, 0.02])
@pytest.mark.parametrize("token_s", [5e-6, 1e-4, 1e-3])
def test_a_call_and_a_token_are_priced_apart(call_s: float, token_s: float) -> None:
    sizes = random.Random(1).choices((1, 16, 64, 300, 1024), k=80)
    price = learned(sizes, call_s=call_s, token_s=token_s)
    for size in (1, 100, 1000):
        assert price.of(size) == pytest.approx(call_s + token_s * size, rel=0.5)


def test_a_call_that_was_held_up_says_little() -> None:
    sizes = random.Random(2).choices((16, 64, 300, 1024), k=100)
    assert learned(sizes, stalls=0.05).of(300) < 3 * learned(sizes).of(300)
