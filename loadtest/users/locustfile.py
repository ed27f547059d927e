"""The former path of `loadtest/locustfile.py`, kept for commands that name it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from loadtest.locustfile import *  # noqa: F403
