"""How a request becomes an answer: bundles in, HTTP out. Nothing here imports torch.

A folder imports only those before it: `errors.py`, `terminal.py` (what commands print), `settings.py`, `runtime/` (one call of ONNX
Runtime, and what engines share), `overload/` (when a request is refused), `tokenization/`, `call.py` (one request beside its body),
`telemetry/`, `encoding/`, `generation/`, `seq2seq/` (three engines), `catalog.py` (the models that are served), `pools/` (engines in
other processes), `http/`, `dialects/`, `app.py` (the ASGI application), `deployment/` (the same under Ray Serve), `cli.py` (`attnserve
serve`, `attnserve config` and the table of all commands).
"""
