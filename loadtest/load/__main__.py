"""`python -m loadtest.load`: the same as `attnserve load`."""

from loadtest.common.terminal import run
from loadtest.load.command import app

run(app, "attnserve load")
