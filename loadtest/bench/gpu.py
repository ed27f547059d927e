"""`attnserve bench-gpu`: measures the graphs for GPUs on this machine, after checking that the GPU computes all of them and that they give
what the CPU gives.

It needs, in the service's environment, onnxruntime-gpu in place of onnxruntime (docs/gpu.md), and bundles exported with `--gpu`. With
`--provider cpu` it runs through without a GPU, to try the command itself: its figures then say nothing about a GPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
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
    gateways: Annotated[
        int, typer.Option(min=0, help="Also measure this many gateways before one encoder over HTTP (profile split); 0: none.")
    ] = 0,
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
        if gateways:
            found["http_split"] = {"gateways": gateways} | over_http(encoder, provider, connections, seconds, gateways)
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


def over_http(bundle: Path, provider: Provider, connections: int, seconds: float, gateways: int = 0) -> dict[str, float]:
    """Return the texts and tokens per second of the service, with token ids in and base64 out. gateways: processes that take the requests
    before the one that computes (profile split); 0: one process does both (profile single)."""
    manifest = contract.read_manifest(bundle)
    length = min(HTTP_TOKENS, manifest.limits.max_tokens)
    flags = ["--provider", provider.value, "--set", "cache_bytes=0"]
    flags += ["--profile", "split", "--set", f"gateways={gateways}"] if gateways else []
    with attnserve(bundle, manifest.name, flags=flags) as server:
        rates = _asked(server, connections, seconds, ["--tokens", str(length), "--vocab-size", str(manifest.limits.vocab_size)])
    texts_per_s = sum(rate["answered_per_s"] for rate in rates) * HTTP_TEXTS
    return {"texts_per_s": texts_per_s, "tokens_per_s": texts_per_s * length, "refused": sum(rate["refused"] for rate in rates)}


def _asked(server: MeasuredServer, connections: int, seconds: float, sizes: Sequence[str]) -> list[dict[str, float]]:
    """Send requests from several processes at the same time. Return what each of them has measured."""
    count = min(connections, max(1, (os.cpu_count() or 1) // 4))
    ends = [connections * number // count for number in range(count + 1)]
    given = {"port": server.port, "path": server.path, "model": server.model, "texts": HTTP_TEXTS, "seconds": seconds}
    same = [f"--{name}={value}" for name, value in given.items()]
    commands = [
        [sys.executable, "-m", "loadtest.bench.gpu_clients", *same, *sizes, "--seed", str(begin), "--connections", str(end - begin)]
        for begin, end in pairwise(ends)
    ]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [client.communicate() for client in clients]
    if failed := next((error for client, (_, error) in zip(clients, said, strict=True) if client.returncode), None):
        raise LoadtestError(f"over HTTP: {''.join(failed.strip().splitlines()[-1:])}")
    return [json.loads(out) for out, _ in said]


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
    for name, title in (("http", "## Over HTTP"), ("http_split", "## Over HTTP, {gateways:.0f} gateways before one encoder")):
        if (http := found.get(name)) is not None:
            best = max(rates["tokens_per_s"] for rates in found["encoder"]["rates"].values())
            share = f"{http['tokens_per_s'] / best:.2f} of the best above"
            rate = f"{http['texts_per_s']:,.0f} texts/s, {http['tokens_per_s']:,.0f} tokens/s, {share}"
            lines += ["", title.format(**http), "", f"{rate}; {http['refused']:.0f} requests refused."]
    return "\n".join(lines) + "\n"
