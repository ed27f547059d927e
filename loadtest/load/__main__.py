"""`python -m loadtest.load`: the same as `attnserve load`."""

from loadtest.load.command import app
from loadtest.terminal import run

run(app, "attnserve load")
