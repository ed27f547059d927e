"""Finds free ports for processes that are about to start."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 20_000  # lower ports are used by Ray's workers (10,002 to 19,999)
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return `count` free ports of 127.0.0.1.

    The ports are below the kernel's ephemeral range, from which Ray takes dozens of ports while it starts. Another program may still take a
    returned port before it is used; then the process that needs the port fails with an error that says so.
    """
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    candidates = list(range(_LOWEST, end)) if end - _LOWEST > 100 * count else [0] * count
    random.SystemRandom().shuffle(candidates)  # not module-level `random`, which may have the same seed in several processes
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", candidates.pop()))
            except OSError:
                continue
            ports.append(probe.getsockname()[1])
        return ports


def free_port() -> int:
    """Return one free port; see `free_ports`."""
    return free_ports(1)[0]
