"""Carry out the Dockerfile without a container engine: its steps in a clean Debian, then the service as in a pod.

    apt-get install debootstrap && pip install dockerfile-parse
    sudo python deploy/images/rehearse.py --bundle bundles/all-MiniLM-L6-v2 --flavour cpu      # a quarter of an hour, 3 GB, network
    sudo python deploy/images/rehearse.py --bundle bundles/all-MiniLM-L6-v2 --as docker        # README.md's line; also kind, kserve

What is checked: each RUN and COPY of the stages succeeds, as written. The entry point then runs as process 1 of its own process namespace,
as uid 1000 without any capability, over a file system that is read-only but for /tmp and /dev/shm. It must become ready, answer KubeRay's
probes (bash and wget), give a vector, and end with status 0 on SIGTERM. `--as` uses the arguments, settings and sized volumes of that line
or pod; the memory of the service must then be below its limit.

Differences from a container engine: memory is compared with its limit, and no limit is set; the port is another; the base is debootstrap's
Debian with its Python 3.11, which needs no registry; network and CPU are the host's; a stage is a folder, not layers. A GPU image is built
but not started: instead all libraries that ONNX Runtime's CUDA provider names must be found, except for the driver's own.
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
DEPLOY = ROOT / "deploy"
DOCKER_TMPFS = "rw,noexec,nosuid,nodev,mode=1777"  # what `--tmpfs /tmp` is


@dataclass(frozen=True)
class RunOptions:
    """The options with which the image is started."""

    settings: dict[str, str]
    arguments: list[str] = field(default_factory=list)  # in the place of the image's
    models: str = "/models"  # where the folder of bundles is, or the bundle itself
    tmp: str = "mode=1777"
    shm_mib: int = 128
    memory_mib: int | None = None


def docker_line(readme: str) -> tuple[argparse.Namespace, str]:
    """The options of the `docker run` line in this text, and its image. SystemExit on an option that is not known here."""
    (line,) = re.findall(r"^\$ docker run ((?:.*\\\n)*.*)$", readme, re.MULTILINE)
    parser = argparse.ArgumentParser(prog="docker run", allow_abbrev=False)
    for flag in ("--rm", "--read-only"):
        parser.add_argument(flag, action="store_true")
    for name in ("--cpus", "--memory", "--shm-size", "--tmpfs", "--stop-timeout"):
        parser.add_argument(name)
    for name in ("-p", "-v", "-e"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("image")
    given = parser.parse_args(shlex.split(line.replace("\\\n", " ")))
    return given, given.image


def mib_of(size: str) -> int:
    """Of 256m or 3g, as Docker writes them, or of 256Mi or 3Gi, as Kubernetes does."""
    return int(size.rstrip("Bbi")[:-1]) * {"m": 1, "g": 1024}[size.rstrip("Bbi")[-1].lower()]


def run_options(way: str, bundle: Path) -> RunOptions:
    """The options of a way to start the image: image (its defaults), docker (README.md's line), kind or kserve (their pods)."""
    if way == "image":
        return RunOptions({"ATTNSERVE_BUNDLES": f"/models/{bundle.name}"})
    if way == "docker":
        given, _ = docker_line((ROOT / "README.md").read_text())
        assert given.read_only
        assert given.tmpfs == "/tmp"
        (volume,) = given.v
        settings = dict(each.split("=", 1) for each in given.e)
        return RunOptions(settings, [], volume.split(":")[1], DOCKER_TMPFS, mib_of(given.shm_size), mib_of(given.memory))
    import yaml

    folder = DEPLOY / {"kind": "overlays/kind", "kserve": "kserve"}[way]
    found = {each["kind"]: each for each in yaml.safe_load_all(subprocess.check_output(["kubectl", "kustomize", str(folder)], text=True))}
    if way == "kind":
        pod = found["Deployment"]["spec"]["template"]["spec"]
        settings, models = found["ConfigMap"]["data"], "/models"
    else:
        pod = found["ServingRuntime"]["spec"]
        example = yaml.safe_load((folder / "example.yaml").read_text())["spec"]["predictor"]["model"]
        settings = {each["name"]: each["value"] for each in (*pod["containers"][0]["env"], *example["env"])}
        models = "/mnt/models"
    (container,) = pod["containers"]
    sizes = {each["name"]: each["emptyDir"]["sizeLimit"] for each in pod["volumes"]}
    mounts = {each["mountPath"]: sizes[each["name"]] for each in container["volumeMounts"]}
    tmp = f"mode=1777,size={mib_of(mounts['/tmp'])}m"
    limit = mib_of(container["resources"]["limits"]["memory"])
    return RunOptions(settings, container["args"], models, tmp, mib_of(mounts["/dev/shm"]), limit)


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


def build(target: str, given: dict[str, str], base: Path, work: Path, *, built: bool = False) -> Stage:
    """Every stage up to `target`, in folders of `work`. `built`: they are there, and only what instructions say is read again."""
    done: dict[str, Stage] = {}
    for name, source, steps in stages(target):
        root = work / name
        if not built:
            subprocess.run(["cp", "-a", "--reflink=auto", str(done[source].root if source in done else base), str(root)], check=True)
        stage = done[name] = Stage(root)
        if source in done:
            stage.env, stage.user, stage.workdir = dict(done[source].env), done[source].user, done[source].workdir
            stage.entrypoint, stage.command = done[source].entrypoint, done[source].command
        for step in steps:
            if built and step["instruction"] in ("COPY", "RUN"):
                continue
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
def running(stage: Stage, bundle: Path, options: RunOptions) -> Iterator["subprocess.Popen[bytes]"]:
    """The entry point as process 1, over a read-only root; its processes die with it."""
    volume = bundle.resolve() if options.models == "/mnt/models" else bundle.parent.resolve()
    (stage.root / options.models.lstrip("/")).mkdir(parents=True, exist_ok=True)  # an engine makes the place of a volume
    # As a kubelet does it: bind, read-only, and volumes over it.
    mounts = f"""
        set -eu
        mount --bind {stage.root} {stage.root}
        mount -t tmpfs -o {options.tmp} tmp {stage.root}/tmp
        mount --bind {volume} {stage.root}{options.models}
        mount -o remount,ro,bind {stage.root}{options.models}
        mount -t proc proc {stage.root}/proc
        mount --rbind /dev {stage.root}/dev
        mount -t tmpfs -o mode=1777,size={options.shm_mib}m shm {stage.root}/dev/shm
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
    arguments = list(options.arguments or stage.command)
    if "--port" in arguments:
        arguments[arguments.index("--port") + 1] = str(PORT)
    variables = [f"{name}={text}" for name, text in {**stage.env, **options.settings, "ATTNSERVE_PORT": str(PORT)}.items()]
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
        *arguments,
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


def memory_mib(process: "subprocess.Popen[bytes]", stage: Stage) -> float:
    """Of all processes of the namespace, shared pages once, and of what is written to /tmp and /dev/shm."""
    namespace = Path(f"/proc/{first_of(process)}/ns/pid").readlink()
    held_kib = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "ns/pid").readlink() == namespace:
                held_kib += int(re.findall(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)[0])
        except (OSError, IndexError):  # it has ended
            continue
    enter = ["nsenter", "--target", str(first_of(process)), "--mount", "df", "--output=used", "-k"]
    written = subprocess.check_output([*enter, f"{stage.root}/tmp", f"{stage.root}/dev/shm"], text=True)
    return (held_kib + sum(map(int, written.split()[1:]))) / 1024


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


def serve(stage: Stage, bundle: Path, options: RunOptions, *, under_load: bool) -> None:
    """Start, probe, ask, stop; an AssertionError says what did not hold."""
    with running(stage, bundle, options) as process:
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
        held_mib = memory_mib(process, stage)
        print(f"ready; a vector of {len(vector)} numbers; {held_mib:.0f} MiB of memory; stopping", flush=True)
        assert options.memory_mib is None or held_mib < options.memory_mib, f"the limit is {options.memory_mib} MiB"
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
        "--as", dest="way", choices=("image", "docker", "kind", "kserve"), default="image", help="how the service is started"
    )
    parser.add_argument("--keep", action="store_true", help="start what was built before, if it was")
    parser.add_argument(
        "--work", type=Path, default=Path("/var/tmp/attnserve-rehearsal"), help="where stages are built; the base is kept there"
    )
    given = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("root is needed: for chroot, mounts and another user")
    base, work = given.work / "base", given.work / given.flavour
    clean_debian(base)
    built = given.keep and (work / "service").exists()
    if not built:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    stage = build("service", {"FLAVOUR": given.flavour}, base, work, built=built)
    if given.flavour == "gpu":
        check_cuda(stage)
    else:
        serve(stage, given.bundle, run_options(given.way, given.bundle), under_load=given.flavour == "load")
    print(f"{given.flavour}, as {given.way}: every step of the Dockerfile succeeded, and the service started, answered and stopped")


if __name__ == "__main__":
    main()
