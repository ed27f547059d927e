"""The simulation finds bugs: with each bug of `mutants.py` some schedule fails. Without a bug none fails (`test_simulation.py`)."""

import pytest

from tests.simulation.mutants import MUTANTS, SCHEDULES

MOST_SCHEDULES = 300  # well under a minute; most bugs show in the first ten


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_found(mutant: str) -> None:
    with MUTANTS[mutant]():
        assert any(SCHEDULES[mutant](seed).wrong for seed in range(MOST_SCHEDULES))
