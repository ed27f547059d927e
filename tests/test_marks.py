"""`make test` stays quick, because only tests that are marked `live` can start the service or a program of others."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", [[sys.executable, "-m", "service.cli", "serve"], ["sh", "-c", 'exec "$@"', "sh", "/usr/sbin/haproxy"]])
def test_a_test_that_is_not_live_cannot_start_the_service(command: list[str]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"mark it with @pytest\.mark\.live"):
        subprocess.run(command, check=False)


def test_the_help_of_a_command_can_be_asked_for() -> None:
    subprocess.run(["echo", "serve", "--help"], check=True, stdout=subprocess.DEVNULL)
