"""Changes the number of users of the plain `locust` command over time, by the shapes of `attnserve load`.

    locust -f loadtest/locustfile.py,loadtest/shapes.py --load-shape spike --users 50 --run-time 5m --headless

`--users` is level 1 of the shape (`loadtest/load/shapes.py`), `--run-time` its whole length.
"""

import sys
from itertools import accumulate
from pathlib import Path

# Add the repository root to sys.path: Locust adds only this file's folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser

from loadtest.load.shapes import SECONDS, STAGES, Shape

CHOICES = (Shape.ramp, Shape.soak, Shape.spike)


def users_at(shape: Shape, second: float, users: int, seconds: float) -> int | None:
    """Return the number of users at a second of a shape that takes `seconds` in all, or None after its end."""
    ends = accumulate(share for _, _, share in STAGES[shape])
    return next((round(level * users) for (_, level, _), end in zip(STAGES[shape], ends, strict=True) if second < end * seconds), None)


class Stages(LoadTestShape):
    use_common_options = True  # Locust accepts --users and --run-time together with a shape

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        shape = Shape(options.load_shape)
        second = self.get_run_time()  # type: ignore[no-untyped-call]
        users = users_at(shape, second, options.num_users or 1, options.run_time or SECONDS[shape])
        return None if users is None else (users, max(users, self.runner.user_count, 1))


def add_option(parser: LocustArgumentParser) -> None:
    parser.add_argument(
        "--load-shape",
        choices=[each.value for each in CHOICES],
        default=Shape.ramp.value,
        help="How the number of users changes over time.",
    )


events.init_command_line_parser.add_listener(add_option)
