"""The HTTP service: it loads bundles and answers requests. Nothing in this package imports torch.

Each entry of this list imports only entries before it: `errors.py`, `terminal.py` (the output of commands), `settings.py`,
`settings_page.py` (writes docs/settings.md), `runtime/` (calls of ONNX Runtime, and modules that all engines share), `overload/` (rules for
refusing requests), `tokenization/`, `call.py` (one request without its body), `telemetry/`, `encoding/`, `generation/`, `encoder_decoder/`
(three engines), `states/` (the store of states that users own), `streams/` (streams that clients can continue), `catalog.py` (the served
models), `pools/` (engines in other processes), `http/`, `dialects/`, `app.py` (the ASGI application), `deployment/` (running it under Ray
Serve), `cli.py` (`attnserve serve`, `attnserve config` and the table of all commands)."""
