"""Ports for processes that are about to start."""

import random
import socket
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 20_000  # below, Ray's workers have theirs (10,002 to 19,999)
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """`count` ports of 127.0.0.1 that nobody holds now.

    The kernel gives ports of its ephemeral range to whoever asks for any, and Ray asks for dozens while it starts: so these are from
    below that range. Between this and their use somebody may still take one; what starts there then fails and says so.
    """
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    candidates = list(range(_LOWEST, end)) if end - _LOWEST > 100 * count else [0] * count
    random.SystemRandom().shuffle(candidates)  # the module's own numbers may be seeded, the same in processes side by side
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
    """One of `free_ports`."""
    return free_ports(1)[0]
