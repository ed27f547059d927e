"""Who may hold how many bytes."""

import pytest

from service.errors import Overloaded
from service.overload.byte_shares import ByteShares


def held(shares: ByteShares, host: str, size: int, times: int = 1) -> int:
    """How many of so many requests of that size are taken whole, in ten pieces each."""
    taken = 0
    for _ in range(times):
        got = 0
        try:
            for _ in range(10):
                shares.take(host, size // 10, got)
                got += size // 10
            taken += 1
        except Overloaded:
            shares.give(host, got)
    return taken


def test_a_host_holds_half_at_most_and_the_next_one_half_of_the_rest() -> None:
    shares = ByteShares("bodies", lambda: 1000)
    held(shares, "a", 10, 1000)
    assert 480 <= shares.used <= 500
    held(shares, "b", 10, 1000)
    assert 730 <= shares.used <= 760
    assert held(shares, "c", 10) == 1


def test_a_request_that_is_alone_may_have_everything() -> None:
    shares = ByteShares("bodies", lambda: 100)
    assert held(shares, "a", 100) == 1
    shares.give("a", 100)
    assert held(shares, "a", 110) == 0
    assert shares.used == 0


def test_a_refusal_takes_nothing_and_names_the_numbers() -> None:
    shares = ByteShares("bodies", lambda: 100)
    shares.take("a", 30)
    with pytest.raises(Overloaded, match=r"bodies of running requests hold 30 bytes of 100, 30 of them for this client.* for 40 more"):
        shares.take("a", 40)
    assert shares.used == 30
