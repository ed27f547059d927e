import socket
from pathlib import Path

from loadtest.common.server import free_port, free_ports


def test_ports_are_different_and_can_be_listened_on() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_the_kernel_gives_them_to_nobody_unasked() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(20_000 <= port < lowest for port in free_ports(50))


def test_a_port_that_is_held_is_not_offered() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()
        assert server.getsockname()[1] not in free_ports(1_000)
