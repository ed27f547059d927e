"""`attnserve bench-gpu`: measures the graphs for GPUs on this machine, after checking that the GPU computes all of them and that they give
what the CPU gives.

It needs, in the service's environment, onnxruntime-gpu in place of onnxruntime (docs/gpu.md), and bundles exported with `--gpu`. With
`--provider cpu` it runs through without a GPU, to try the command itself: its figures then say nothing about a GPU.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from export import contract
from loadtest.common import machine
from loadtest.common.server import MeasuredServer, attnserve
from loadtest.errors import LoadtestError
from service.terminal import command_app, console

app = command_app()

Provider = StrEnum("Provider", ["cuda", "cpu"])
ENCODER_SIZES = ("1x16", "32x16", "256x16", "1024x16", "1x128", "32x128", "256x128", "1x512", "16x512", "64x512")
DECODER_SIZES = ("1", "8", "64", "256", "1024")
HTTP_TEXTS, HTTP_TOKENS = 32, 128  # texts of a request, and tokens of a text


@app.command()
def bench_gpu(
    encoder: Annotated[Path | None, typer.Option(help="Bundle of an encoder, exported with --gpu.")] = None,
    decoder: Annotated[Path | None, typer.Option(help="Bundle of a decoder, exported with --gpu.")] = None,
    provider: Annotated[
        Provider, typer.Option(help="cuda needs a GPU and onnxruntime-gpu; cpu only shows that everything runs.")
    ] = Provider.cuda,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of one measurement.")] = 3,
    sizes: Annotated[str, typer.Option(help="Texts x tokens to measure, separated by commas.")] = ",".join(ENCODER_SIZES),
    rows: Annotated[str, typer.Option(help="Rows of decode steps to measure, separated by commas.")] = ",".join(DECODER_SIZES),
    http: Annotated[bool, typer.Option("--http/--no-http", help="Also measure the encoder over HTTP.")] = True,
    connections: Annotated[int, typer.Option(min=1, help="Connections over HTTP.")] = 32,
    out: Annotated[Path, typer.Option(help="Folder for the page and the JSON file.")] = Path("out/bench-gpu"),
) -> None:
    """Measure encoders and decoders on a GPU, and write a page. Takes a few minutes. Exits with 1 if a GPU cannot be used."""
    if encoder is None and decoder is None:
        raise typer.BadParameter("give --encoder BUNDLE, --decoder BUNDLE or both")
    about = {**machine.about_run(), "provider": provider.value, "gpu": gpu_name()}
    found: dict[str, Any] = {}
    for kind, bundle, which in (("encoder", encoder, sizes), ("decoder", decoder, rows)):
        if bundle is not None:
            console.print(f"{kind} {bundle}, {which}", highlight=False)
            found[kind] = in_process(kind, bundle, provider, which.split(","), seconds)
    if http and encoder is not None:
        console.print(f"over HTTP: {connections} connections, {HTTP_TEXTS} texts of {HTTP_TOKENS} token ids a request", highlight=False)
        found["http"] = over_http(encoder, provider, connections, seconds)
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps({"about": about, **found}, indent=1))
    (out / "gpu.md").write_text(page(about, found))
    console.print((out / "gpu.md").read_text(), highlight=False, markup=False, soft_wrap=True)


def in_process(kind: str, bundle: Path, provider: Provider, sizes: Sequence[str], seconds: float) -> dict[str, Any]:
    """Check and measure a bundle in a new process. Raises LoadtestError with its last line if that fails."""
    command = [sys.executable, "-m", "loadtest.in_process.gpu", kind, str(bundle), "--provider", provider.value]
    ended = subprocess.run([*command, "--seconds", str(seconds), "--sizes", *sizes], check=False, capture_output=True, text=True)
    if ended.returncode:
        raise LoadtestError(f"{kind} on {provider.value}: {''.join(ended.stderr.strip().splitlines()[-1:])}")
    measured: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return measured


def over_http(bundle: Path, provider: Provider, connections: int, seconds: float) -> dict[str, float]:
    """Return the texts and tokens per second of the service, with token ids in and base64 out. The clients are threads of this process."""
    manifest = contract.read_manifest(bundle)
    length, vocab_size = min(HTTP_TOKENS, manifest.limits.max_tokens), manifest.limits.vocab_size
    flags = ["--provider", provider.value, "--set", "cache_bytes=0"]
    with attnserve(bundle, manifest.name, flags=flags) as server, ThreadPoolExecutor(connections) as clients:
        until = time.perf_counter() + seconds
        counts = clients.map(lambda number: _requests(server, Random(number), length, vocab_size, until), range(connections))
        answered, refused = (sum(column) for column in zip(*counts, strict=True))
        elapsed = time.perf_counter() - until + seconds
    texts_per_s = answered * HTTP_TEXTS / elapsed
    return {"texts_per_s": texts_per_s, "tokens_per_s": texts_per_s * length, "refused": refused}


def _requests(server: MeasuredServer, random: Random, length: int, vocab_size: int, until: float) -> tuple[int, int]:
    """Send requests one after the other. Return the number of answered ones, of which no two have equal texts, and of refused ones."""
    connection, answered, refused = HTTPConnection("127.0.0.1", server.port, timeout=120), 0, 0
    row = [random.randrange(vocab_size) for _ in range(length)]
    while time.perf_counter() < until or not answered + refused:
        texts = [[*row[:-3], *divmod(HTTP_TEXTS * answered + at, vocab_size), random.randrange(vocab_size)] for at in range(HTTP_TEXTS)]
        body = json.dumps({"model": server.model, "input": texts, "encoding_format": "base64"})
        connection.request("POST", server.path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            refused += 1
            time.sleep(float(answer.headers["Retry-After"]))
            continue
        if answer.status != 200:
            raise LoadtestError(f"the service answered {answer.status}: {content[:300].decode(errors='replace')}")
        answered += 1
    connection.close()
    return answered, refused


def gpu_name() -> str | None:
    """Return what nvidia-smi says of the GPUs, or None without it."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        return "; ".join(subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines())
    except (OSError, subprocess.CalledProcessError):
        return None


def page(about: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    on_gpu = about["provider"] == "cuda"
    lines = [
        f"# On {about['gpu'] if on_gpu else 'a CPU: these are no figures of a GPU'}",
        "",
        f"{about['date']}, {about['cpus']} cores, {about['cpu']}, commit {about['commit']}, `{' '.join(about['command'])}`.",
        f"Versions: {', '.join(f'{name} {version}' for name, version in about['versions'].items())}.",
    ]
    equality = {"encoder": "lowest cosine to the CPU's vectors", "decoder": "logits of drawn tokens below the CPU's largest by at most"}
    for kind, told in equality.items():
        if (measured := found.get(kind)) is not None:
            names = list(next(iter(measured["rates"].values())))
            operators = ", ".join(f"{n} {operator}" for operator, n in measured["assigned"].items())
            lines += [
                "",
                f"## {kind.capitalize()}",
                "",
                f"{told}: {measured['equal']:.6f}. All nodes are on {about['provider']}: {operators}.",
            ]
            lines += ["", f"| {'texts x tokens' if kind == 'encoder' else 'rows'} | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
            lines += [f"| {size} | {' | '.join(f'{rates[name]:,.0f}' for name in names)} |" for size, rates in measured["rates"].items()]
    if (http := found.get("http")) is not None:
        best = max(rates["tokens_per_s"] for rates in found["encoder"]["rates"].values())
        share = f"{http['tokens_per_s'] / best:.2f} of the best above"
        rate = f"{http['texts_per_s']:,.0f} texts/s, {http['tokens_per_s']:,.0f} tokens/s, {share}; {http['refused']} requests refused."
        lines += ["", "## Over HTTP", "", rate]
    return "\n".join(lines) + "\n"
