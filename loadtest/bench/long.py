"""The part `long`: an encoder of linear cost beside the softmax encoder that it was distilled from, its teacher.

Lengths range from the longest text of the teacher to many times that; for the longer ones, the teacher's positions are repeated. ONNX
Runtime runs each bundle in its own process, one text at a time on all cores, in the graph that a service would use.
"""

from functools import partial
from pathlib import Path

from export import contract
from loadtest.common import machine
from loadtest.common.benchmark import Benchmark, Figures, Plan, Side
from loadtest.common.report import Bar, Row
from loadtest.errors import LoadtestError
from loadtest.in_process import bare

LENGTHS = (512, 1_024, 2_048, 4_096, 8_192)
# The linear encoder reads the shortest texts by the teacher's own attention: no slower, up to the spread of the rounds.
NO_SLOWER, TIMES = 0.97, 4.5  # required of the ratio at the shortest and at the longest length


def benchmark(plan: Plan) -> Benchmark:
    """Compare the first bundle, which is linear, with the second. Raises LoadtestError if they read too short texts."""
    most = min(contract.verify(folder).limits.max_tokens for folder in plan.bundles)
    lengths = [N for N in LENGTHS if most >= N]
    if not lengths:
        raise LoadtestError(
            f"the bundles accept up to {most} tokens, but the shortest measured length is {LENGTHS[0]}; export for longer texts"
        )

    def measure(bundle: Path, _: object) -> Figures:
        timings = bare.measure(bundle, [(1, N) for N in lengths], threads=machine.cpus(), seconds=plan.seconds, spin=False)
        return {f"{N}": timing["texts_per_s"] * N for (_, N), timing in timings.items()}

    sides = [Side(name, {"lengths": partial(measure, bundle)}) for name, bundle in zip(("linear", "teacher"), plan.bundles, strict=True)]
    bars = {LENGTHS[0]: Bar(reference="the teacher", at_least=NO_SLOWER), LENGTHS[-1]: Bar(reference="the teacher", at_least=TIMES)}
    rows = [Row(f"one text of {N:,} tokens", "tokens/s", ("linear", f"{N}"), ("teacher", f"{N}"), bars.get(N)) for N in lengths]
    return Benchmark(sides, rows)
