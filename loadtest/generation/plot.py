"""A picture of the price of a token."""

from collections.abc import Sequence
from pathlib import Path

from loadtest.generation.steps import Stretch


def price_of_a_token(stretches: Sequence[Stretch], file: Path, title: str) -> None:
    """Milliseconds a token, and resident memory, along one sequence, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    positions = [stretch.first for stretch in stretches]
    figure, (time, memory) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    time.plot(positions, [stretch.s_per_token * 1000 for stretch in stretches])
    time.set_ylabel("ms per token")
    time.set_ylim(bottom=0)
    time.set_title(title, fontsize=9)
    resident = [stretch.rss_bytes / 2**20 for stretch in stretches]
    memory.plot(positions, resident)
    memory.set_ylabel("resident MiB")
    memory.set_ylim(0, 1.2 * max(resident))
    memory.set_xlabel("position in the sequence, tokens")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
