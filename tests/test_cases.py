"""Cases that run in one test are named like tests of their own when they fail."""

from inspect import signature

import pytest

from tests.cases import in_one_test


def test_all_cases_run_and_each_that_fails_is_named_with_its_error() -> None:
    tried = []

    @in_one_test("sign", [1, -1])
    @in_one_test(("n", "half"), [(2, 1), (3, 1), (5, 2)])
    def halves(fixture: str, sign: int, n: int, half: int) -> None:
        tried.append((fixture, sign * n))
        assert n == 2 * half or sign < 0

    assert list(signature(halves).parameters) == ["fixture"]
    with pytest.raises(ExceptionGroup, match=r"1 of 2 cases failed: sign=1 \(2 of 3 cases failed: n=3, half=1; n=5, half=2\)") as failed:
        halves(fixture="a")
    assert tried == [("a", sign * n) for sign in (1, -1) for n in (2, 3, 5)]
    (group,) = failed.value.exceptions
    assert isinstance(group, ExceptionGroup)
    assert [error.__notes__ for error in group.exceptions] == [["in the case n=3, half=1"], ["in the case n=5, half=2"]]
