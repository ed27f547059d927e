"""`python -m tests.simulation --seeds N --first S`: run schedules, print those that go wrong, and how many run in a second."""

import argparse
import logging
import time
from collections import Counter

from tests.simulation.gateways import simulate_gateways
from tests.simulation.world import explain, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--gateways", action="store_true", help="schedules of gateways and their leases")
    parser.add_argument("--digests", action="store_true", help="print the digest of each schedule")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    stats: Counter[str] = Counter()
    wrong = 0
    began = time.perf_counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        result = simulate_gateways(seed) if arguments.gateways else simulate(seed)
        stats.update(result.stats)
        if arguments.digests:
            print(seed, result.digest)
        if result.wrong:
            wrong += 1
            print(explain(result), end="\n\n")
    took_s = time.perf_counter() - began
    print(f"{arguments.seeds} schedules in {took_s:.1f} s, {arguments.seeds / took_s:.1f} a second; {wrong} went wrong")
    print(", ".join(f"{count} {what}" for what, count in sorted(stats.items())))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
