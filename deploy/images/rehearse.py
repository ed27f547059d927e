"""Carry out the Dockerfile without a container engine: its steps in order, in a clean Debian, and the service out of it as in a pod.

    apt-get install debootstrap && pip install dockerfile-parse
    sudo python deploy/images/rehearse.py --bundle bundles/all-MiniLM-L6-v2 --flavour cpu      # a quarter of an hour, 3 GB, network

What is held to: each RUN and COPY of the stages succeeds, as written. The entry point then runs as process 1 of its own process namespace,
as uid 1000 without any capability, over a file system that is read-only but for /tmp and /dev/shm. It must become ready, answer KubeRay's
way of probing (bash and wget), give a vector, and end with status 0 on SIGTERM.

What differs from an engine: the base is debootstrap's Debian with its Python 3.11, since no registry is needed for that; network and CPU
are the host's; a stage is a folder and no stack of layers. A GPU image is built but not started: instead the libraries that ONNX Runtime's
CUDA provider names must all be found, but for the driver's own.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
DOCKERFILE = Path(__file__).parent / "Dockerfile"
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FROM_HOST = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/ssl/certs/ca-certificates.crt",
)  # an engine brings the first two; a proxy may need the last
START_S, STOP_S = 120, 60
PORT = 18000


@dataclass
class Stage:
    """One FROM and what has been carried out of it: `root` is the file system so far."""

    root: Path
    args: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=lambda: {"PATH": IMAGE_PATH})
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def filled(self, text: str) -> str:
        """`text` with ${NAME} and $NAME of arguments and environment."""
        known = {**self.args, **self.env}
        return re.sub(r"\$\{?(\w+)\}?", lambda name: known[name[1]], text)


def stages(target: str) -> list[tuple[str, str, list[dict[str, str]]]]:
    """(name, base, instructions) of each stage from the top until `target` is complete."""
    parser = DockerfileParser(fileobj=DOCKERFILE.open("rb"))
    found: list[tuple[str, str, list[dict[str, str]]]] = []
    for step in parser.structure:
        if step["instruction"] == "FROM":
            if found and found[-1][0] == target:
                break
            base, _, name = step["value"].partition(" AS ")
            found.append((name, base, []))
        elif found and step["instruction"] != "COMMENT":
            found[-1][2].append(step)
    return found


def build(target: str, given: dict[str, str], base: Path, work: Path) -> Stage:
    """Every stage up to `target`, in folders of `work`."""
    done: dict[str, Stage] = {}
    for name, source, steps in stages(target):
        root = work / name
        subprocess.run(["cp", "-a", "--reflink=auto", str(done[source].root if source in done else base), str(root)], check=True)
        stage = done[name] = Stage(root)
        if source in done:
            stage.env, stage.user, stage.workdir = dict(done[source].env), done[source].user, done[source].workdir
            stage.entrypoint, stage.command = done[source].entrypoint, done[source].command
        for step in steps:
            print(f"[{name}] {step['instruction']} {' '.join(step['value'].split())[:110]}", flush=True)
            carry_out(step["instruction"], step["value"], stage, given, done)
    return done[target]


def carry_out(instruction: str, value: str, stage: Stage, given: dict[str, str], done: dict[str, Stage]) -> None:
    match instruction:
        case "ARG":
            name, _, default = value.partition("=")
            stage.args[name] = given.get(name, default)
        case "ENV":
            stage.env |= {name: stage.filled(text) for name, text in (pair.split("=", 1) for pair in shlex.split(value))}
        case "WORKDIR":
            stage.workdir = value
        case "USER":
            stage.user = value
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(value)
        case "CMD":
            stage.command = json.loads(value)
        case "COPY":
            copy(stage.filled(value), stage, done)
        case "RUN":
            inside(stage, ["/bin/sh", "-c", value], stage.user)
        case "LABEL" | "EXPOSE":
            pass
        case other:
            raise NotImplementedError(f"the Dockerfile uses {other}, which the rehearsal does not know")


def copy(value: str, stage: Stage, done: dict[str, Stage]) -> None:
    """COPY: the content of a folder, or files into a folder or to a name."""
    words = shlex.split(value)
    context = ROOT
    if words[0].startswith("--from="):
        context = done[words.pop(0).removeprefix("--from=")].root
    *sources, target = words
    destination = stage.root / target.lstrip("/")
    (destination if target.endswith("/") else destination.parent).mkdir(parents=True, exist_ok=True)
    for source in sources:
        origin = context / source.lstrip("/")
        subprocess.run(
            ["cp", "-a", "--no-preserve=ownership", "-T" if origin.is_dir() else "--", str(origin), str(destination)], check=True
        )
    # Root owns what is copied and everybody may read it, as with an engine.
    subprocess.run(["chmod", "-R", "a+rX,go-w", str(destination)], check=True)


def inside(stage: Stage, command: list[str], user: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run `command` in the stage with its environment and nothing of ours."""
    uid, _, gid = user.partition(":")
    chroot = ["chroot", f"--userspec={uid}:{gid or uid}", str(stage.root), "/usr/bin/env", "-i", "-C", stage.workdir]
    variables = [f"{name}={text}" for name, text in {**stage.args, **stage.env}.items()]
    return subprocess.run([*chroot, *variables, *command], check=True, text=True, **options)  # type: ignore[call-overload]


def clean_debian(base: Path) -> None:
    """What the python:3.11-slim-bookworm image is: Debian's minimum and a `python` in /usr/local/bin."""
    if not (base / "usr/local/bin/python").exists():
        shutil.rmtree(base, ignore_errors=True)
        subprocess.run(["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(base)], check=True)
        stage = Stage(base)
        supply(stage)
        install = "apt-get update && apt-get install -y --no-install-recommends python3.11 python3.11-venv && rm -rf /var/lib/apt/lists/*"
        inside(stage, ["/bin/sh", "-c", f"{install} && ln -s /usr/bin/python3.11 /usr/local/bin/python"], "0:0")
    supply(Stage(base))


def supply(stage: Stage) -> None:
    for file in FROM_HOST:
        if Path(file).exists():
            shutil.copy(file, stage.root / file.lstrip("/"))


@contextmanager
def running(stage: Stage, bundle: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The entry point as process 1, over a read-only root; its processes die with it."""
    # As a kubelet does it: bind, read-only, and volumes over it. `bundle` is the volume of models.
    mounts = f"""
        set -eu
        mount --bind {stage.root} {stage.root}
        mount -t tmpfs -o mode=1777 tmp {stage.root}/tmp
        mount --bind {bundle.parent.resolve()} {stage.root}/models
        mount -o remount,ro,bind {stage.root}/models
        mount -t proc proc {stage.root}/proc
        mount --rbind /dev {stage.root}/dev
        mount -t tmpfs -o mode=1777,size=128m shm {stage.root}/dev/shm
        mount -o remount,ro,bind {stage.root}
        exec "$@"
    """
    uid, _, gid = stage.user.partition(":")
    powerless = [
        "setpriv",
        f"--reuid={uid}",
        f"--regid={gid}",
        "--clear-groups",
        "--bounding-set=-all",
        "--inh-caps=-all",
        "--no-new-privs",
    ]
    settings = {"ATTNSERVE_BUNDLES": f"/models/{bundle.name}", "ATTNSERVE_PORT": str(PORT)}
    variables = [f"{name}={text}" for name, text in {**stage.env, **settings}.items()]
    start = [
        "chroot",
        str(stage.root),
        *powerless,
        "/usr/bin/env",
        "-i",
        "-C",
        stage.workdir,
        *variables,
        *stage.entrypoint,
        *stage.command,
    ]
    process = subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", mounts, "sh", *start])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def first_of(process: "subprocess.Popen[bytes]") -> int:
    """Process 1 of the namespace, by its number here."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def within(process: "subprocess.Popen[bytes]", stage: Stage, command: str) -> int:
    """The status of a shell command beside the service, as `kubectl exec` or a probe runs it."""
    enter = ["nsenter", "--target", str(first_of(process)), "--mount", "--pid", "chroot", "--userspec=1000:1000", str(stage.root)]
    return subprocess.run([*enter, "/usr/bin/env", "-i", f"PATH={stage.env['PATH']}", "bash", "-c", command], check=False).returncode


def answer(path: str, body: dict[str, object] | None = None) -> tuple[int, bytes]:
    request = Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode() if body else None, {"content-type": "application/json"})
    with urlopen(request, timeout=10) as response:
        return response.status, response.read()


def load(process: "subprocess.Popen[bytes]", stage: Stage) -> None:
    """The load test out of its own image. Whether its marks are reached says something of this machine, not of the image."""
    arguments = f"--url http://127.0.0.1:{PORT} --shape steady --minutes 0.2 --closed 2 --workers 1 --out /tmp/load"
    within(process, stage, f"cd /tmp && HOME=/tmp attnserve load {arguments}")
    assert within(process, stage, "ls /tmp/load/*/run.json /tmp/load/*/*.png") == 0, "the load test left no results"


def serve(stage: Stage, bundle: Path, *, under_load: bool) -> None:
    """Start, probe, ask, stop; an AssertionError says what did not hold."""
    with running(stage, bundle) as process:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, f"the service ended with status {process.returncode} before it was ready"
            assert time.monotonic() < deadline, f"not ready after {START_S} s"
            try:
                if answer("/health/ready")[0] == 200:
                    break
            except (URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        assert within(process, stage, "touch /opt/attnserve/x /x 2>/dev/null") != 0, "the file system can be written to"
        assert within(process, stage, f"wget -T 2 -q -O- http://localhost:{PORT}/health/ready | grep -q ready") == 0, (
            "KubeRay's way to probe fails"
        )
        status, body = answer("/v1/embeddings", {"model": bundle.name, "input": "Attention is all you need"})
        vector = json.loads(body)["data"][0]["embedding"]
        print(f"ready; a vector of {len(vector)} numbers; stopping", flush=True)
        assert status == 200
        if under_load:
            load(process, stage)
        os.kill(first_of(process), signal.SIGTERM)
        assert process.wait(STOP_S) == 0, f"SIGTERM ended the service with status {process.returncode}"


def check_cuda(stage: Stage) -> None:
    """Every library that ONNX Runtime's CUDA provider names is in the image, but for the driver's, which the node brings."""
    provider = "/opt/attnserve/lib/python3.11/site-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so"
    listed = inside(stage, ["ldd", provider], stage.user, capture_output=True).stdout
    missing = {line.split()[0] for line in listed.splitlines() if "not found" in line}
    print(f"the CUDA provider finds all but {sorted(missing) or 'nothing'}", flush=True)
    assert missing <= {"libcuda.so.1", "libonnxruntime.so.1"}, f"the CUDA provider does not find {sorted(missing)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="an encoder's bundle, to be served from a volume")
    parser.add_argument("--flavour", choices=("cpu", "gpu", "load"), default="cpu")
    parser.add_argument(
        "--work", type=Path, default=Path("/var/tmp/attnserve-rehearsal"), help="where stages are built; the base is kept there"
    )
    given = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("root is needed: for chroot, mounts and another user")
    base, work = given.work / "base", given.work / given.flavour
    clean_debian(base)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    stage = build("service", {"FLAVOUR": given.flavour}, base, work)
    if given.flavour == "gpu":
        check_cuda(stage)
    else:
        serve(stage, given.bundle, under_load=given.flavour == "load")
    print(f"{given.flavour}: the Dockerfile's steps and the service hold")


if __name__ == "__main__":
    main()
