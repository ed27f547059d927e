"""Measures how long the sampler takes to draw a token for each row of logits, for several sizes of vocabulary, numbers of rows and kinds of
truncation: `python -m loadtest.in_process.draws`."""

import itertools
from dataclasses import replace

import numpy as np
from rich.table import Table

from loadtest.common.terminal import progress, stdout
from loadtest.in_process.steps import median_s
from service.generation.request import Sampling
from service.generation.sampling.sampler import Sampler

VOCABULARIES, ROWS, SECONDS = (4096, 50_000), (1, 32), 0.5
KINDS = {
    "greedy": Sampling(seed=0, temperature=0),
    "no truncation": Sampling(seed=0),
    "top_k 40": Sampling(seed=0, top_k=40),
    "top_p 0.9": Sampling(seed=0, top_p=0.9),
    "top_p 0.9, temperature 3": Sampling(seed=0, top_p=0.9, temperature=3.0),
    "min_p 0.05": Sampling(seed=0, min_p=0.05),
    "typical_p 0.9": Sampling(seed=0, typical_p=0.9),
    "top_k 50, top_p 0.95, min_p 0.02": Sampling(seed=0, top_k=50, top_p=0.95, min_p=0.02),
}


def draw_s(sampling: Sampling, vocab_size: int, rows: int) -> float:
    """Return the median seconds of one draw for all rows. The logits have a normal distribution with a standard deviation of 3."""
    sampler = Sampler(vocab_size, rows)
    for row in range(rows):
        sampler.put(row, replace(sampling, seed=row), prompt=(1,))
    logits = (np.random.default_rng(0).standard_normal((rows, vocab_size)) * 3).astype(np.float32)
    return median_s(lambda: sampler.draw(logits), SECONDS)


def main() -> None:
    """Print a table of the milliseconds that one draw takes."""
    columns = list(itertools.product(VOCABULARIES, ROWS))
    table = Table("ms", *(f"V = {vocab_size:,}, {rows} rows" for vocab_size, rows in columns))
    with progress(len(KINDS)) as show:
        for name, sampling in KINDS.items():
            show(name)
            table.add_row(name, *(f"{draw_s(sampling, *column) * 1e3:.3f}" for column in columns))
    stdout(width=130).print(table)


if __name__ == "__main__":
    main()
