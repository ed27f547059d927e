"""Execute the Dockerfile without a container engine: run its steps in a clean Debian, then start the service as in a pod.

    apt-get install debootstrap && pip install dockerfile-parse
    sudo python deploy/images/rehearse.py --bundle bundles/all-MiniLM-L6-v2 --flavour cpu      # 15 minutes, 3 GB, network
    sudo python deploy/images/rehearse.py --bundle bundles/all-MiniLM-L6-v2 --as docker        # README.md's line; also kind, kserve

Checks: each RUN and COPY of the stages succeeds unchanged. The entry point then runs as process 1 of its own process namespace, as uid
1000 without capabilities, on a file system that is read-only except /tmp and /dev/shm. It must become ready, answer KubeRay's probes
(bash and wget), return an embedding, and exit with status 0 on SIGTERM. `--as` uses the arguments, settings and sized volumes of that
command line or pod; the service's memory must then stay below its limit.

Differences from a container engine: memory is compared with its limit, which is not enforced; the port differs; the base is debootstrap's
Debian with Python 3.11, which needs no registry; network and CPU are the host's; a stage is a folder without layers. A GPU image is built
but not started. Instead, all libraries that ONNX Runtime's CUDA provider needs must be found, except the driver's.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
DOCKERFILE = Path(__file__).parent / "Dockerfile"
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A container engine brings the first two; a proxy may need the last.
FROM_HOST = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
START_S, STOP_S = 120, 60
PORT = 18000
DEPLOY = ROOT / "deploy"
DOCKER_TMPFS = "rw,noexec,nosuid,nodev,mode=1777"  # the options of `--tmpfs /tmp`


@dataclass(frozen=True)
class RunOptions:
    """The options with which the image is started."""

    settings: dict[str, str]
    arguments: list[str] = field(default_factory=list)  # replace the image's own arguments
    models: str = "/models"  # path of the folder of bundles, or of the bundle
    tmp: str = "mode=1777"
    shm_mib: int = 128
    memory_mib: int | None = None


def docker_line(readme: str) -> tuple[argparse.Namespace, str]:
    """Return the options of the `docker run` line in `readme`, and its image. Raises SystemExit on an unknown option."""
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
    """Convert a size of Docker (256m, 3g) or Kubernetes (256Mi, 3Gi) to MiB."""
    return int(size.rstrip("Bbi")[:-1]) * {"m": 1, "g": 1024}[size.rstrip("Bbi")[-1].lower()]


def run_options(way: str, bundle: Path) -> RunOptions:
    """Return the options for `way`: image (the image's defaults), docker (README.md's line), kind or kserve (their pods)."""
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
    """One FROM stage of the Dockerfile during the build. `root` is its file system so far."""

    root: Path
    args: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=lambda: {"PATH": IMAGE_PATH})
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def filled(self, text: str) -> str:
        """Replace ${NAME} and $NAME in `text` by build arguments and environment variables."""
        known = {**self.args, **self.env}
        return re.sub(r"\$\{?(\w+)\}?", lambda name: known[name[1]], text)


def stages(target: str) -> list[tuple[str, str, list[dict[str, str]]]]:
    """Return (name, base, instructions) of each stage, from the top of the file to the stage `target`."""
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
    """Build every stage up to `target` in folders of `work`. With `built`, the folders exist and only the instructions are read."""
    done: dict[str, Stage] = {}
    for name, source, steps in stages(target):
        root = work / name
        if not built:
            subprocess.run(["cp", "-a", "--reflink=auto", str(done[source].root if source in done else base), str(root)], check=True)
        stage = done[name] = replace(done[source], root=root, args={}) if source in done else Stage(root)
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
            stage.env = stage.env | {name: stage.filled(text) for name, text in (pair.split("=", 1) for pair in shlex.split(value))}
        case "WORKDIR" | "USER":
            setattr(stage, instruction.lower(), value)
        case "ENTRYPOINT" | "CMD":
            setattr(stage, "entrypoint" if instruction == "ENTRYPOINT" else "command", json.loads(value))
        case "COPY":
            copy(stage.filled(value), stage, done)
        case "RUN":
            inside(stage, ["/bin/sh", "-c", value], stage.user)
        case "LABEL" | "EXPOSE":
            pass
        case other:
            raise NotImplementedError(f"the Dockerfile uses {other}, which the rehearsal does not know")


def copy(value: str, stage: Stage, done: dict[str, Stage]) -> None:
    """Execute COPY, which copies the content of a folder, or files into a folder or to a file name."""
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
    # As with an engine, root owns copied files and everybody may read them.
    subprocess.run(["chmod", "-R", "a+rX,go-w", str(destination)], check=True)


def inside(stage: Stage, command: list[str], user: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run `command` in the stage with only the stage's environment."""
    uid, _, gid = user.partition(":")
    chroot = ["chroot", f"--userspec={uid}:{gid or uid}", str(stage.root), "/usr/bin/env", "-i", "-C", stage.workdir]
    variables = [f"{name}={text}" for name, text in {**stage.args, **stage.env}.items()]
    return subprocess.run([*chroot, *variables, *command], check=True, text=True, **options)  # type: ignore[call-overload]


def clean_debian(base: Path) -> None:
    """Install the equivalent of the image python:3.11-slim-bookworm: a minimal Debian, and a `python` in /usr/local/bin."""
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
    """Run the entry point as process 1 on a read-only root. Its child processes end with it."""
    volume = bundle.resolve() if options.models == "/mnt/models" else bundle.parent.resolve()
    (stage.root / options.models.lstrip("/")).mkdir(parents=True, exist_ok=True)  # an engine creates a volume's mount point
    # Bind-mount the root read-only and mount the volumes over it, as a kubelet does.
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
    powerless = f"setpriv --reuid={uid} --regid={gid} --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs".split()
    arguments = list(options.arguments or stage.command)
    if "--port" in arguments:
        arguments[arguments.index("--port") + 1] = str(PORT)
    variables = [f"{name}={text}" for name, text in {**stage.env, **options.settings, "ATTNSERVE_PORT": str(PORT)}.items()]
    environment = ["/usr/bin/env", "-i", "-C", stage.workdir, *variables]
    start = ["chroot", str(stage.root), *powerless, *environment, *stage.entrypoint, *arguments]
    process = subprocess.Popen(["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", mounts, "sh", *start])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def first_of(process: "subprocess.Popen[bytes]") -> int:
    """Return the host's process id of the namespace's process 1."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def memory_mib(process: "subprocess.Popen[bytes]", stage: Stage) -> float:
    """Return the memory of all processes in the namespace, shared pages counted once, plus the files in /tmp and /dev/shm."""
    namespace = Path(f"/proc/{first_of(process)}/ns/pid").readlink()
    held_kib = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "ns/pid").readlink() == namespace:
                held_kib += int(re.findall(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)[0])
        except (OSError, IndexError):  # the process has ended
            continue
    enter = ["nsenter", "--target", str(first_of(process)), "--mount", "df", "--output=used", "-k"]
    written = subprocess.check_output([*enter, f"{stage.root}/tmp", f"{stage.root}/dev/shm"], text=True)
    return (held_kib + sum(map(int, written.split()[1:]))) / 1024


def within(process: "subprocess.Popen[bytes]", stage: Stage, command: str) -> int:
    """Run a shell command next to the service, as `kubectl exec` or a probe does, and return its exit status."""
    enter = ["nsenter", "--target", str(first_of(process)), "--mount", "--pid", "chroot", "--userspec=1000:1000", str(stage.root)]
    return subprocess.run([*enter, "/usr/bin/env", "-i", f"PATH={stage.env['PATH']}", "bash", "-c", command], check=False).returncode


def answer(path: str, body: dict[str, object] | None = None) -> tuple[int, bytes]:
    request = Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode() if body else None, {"content-type": "application/json"})
    with urlopen(request, timeout=10) as response:
        return response.status, response.read()


def load(process: "subprocess.Popen[bytes]", stage: Stage) -> None:
    """Run the load test from its own image. Whether it passes depends on this machine, so it is no check of the image."""
    arguments = f"--url http://127.0.0.1:{PORT} --shape steady --minutes 0.2 --closed 2 --workers 1 --out /tmp/load"
    within(process, stage, f"cd /tmp && HOME=/tmp attnserve load {arguments}")
    assert within(process, stage, "ls /tmp/load/*/run.json /tmp/load/*/*.png") == 0, "the load test left no results"


def serve(stage: Stage, bundle: Path, options: RunOptions, *, under_load: bool) -> None:
    """Start the service, probe it, send requests and stop it. Raises AssertionError for a check that fails."""
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
    """Check that every library which ONNX Runtime's CUDA provider needs is in the image, except the driver's, which the node has."""
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
