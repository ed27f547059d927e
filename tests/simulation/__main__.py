"""`python -m tests.simulation --seeds N --first S`: run schedules, print the digest of each, and the end of those that go wrong."""

import argparse
import logging

from tests.simulation.gateways import simulate_gateways
from tests.simulation.world import explain, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--gateways", action="store_true", help="schedules of gateways and their leases")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    results = [simulate_gateways(seed) if arguments.gateways else simulate(seed) for seed in seeds]
    for result in results:
        print(result.seed, result.digest, *([explain(result)] if result.wrong else []))
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
