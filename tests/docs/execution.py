"""Execute a block of a page as a reader would: in the root of a checkout, one command after the other.

The checkout is a folder of links to this one, with its own `bundles/`, `out/` and `data/`, so that a block leaves nothing behind. The
ports of the pages become a free port. A command that serves runs in the background until the block has ended, and then ends by SIGTERM.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from loadtest.common.server import free_port
from tests.docs.pages import ROOT, Block, commands

OWN = {".git", ".venv", "bundles", "data", "out"}
LIMIT_S = 900
SERVES = re.compile(r"^(\.venv/bin/)?(attnserve|make) serve\b")
_ADDRESS = re.compile(r"(\b(?:127\.0\.0\.1|localhost):|--port )800[01]\b")
_PRELUDE = """\
set -euo pipefail
served() {  # PID LOG: return when the service is ready, fail if it ends before
    until grep -q 'ready at' "$2"; do kill -0 "$1" || { cat "$2" >&2; exit 1; }; sleep 0.1; done
    trap "kill -TERM $1; wait $1 || true" EXIT
}
"""


class Checkout:
    """`bundles` by name are in `bundles/`, and `checkpoint` is the folder that pages call `path/to/folder`."""

    def __init__(self, folder: Path, bundles: Mapping[str, Path], *, checkpoint: Path) -> None:
        self.folder = folder
        (folder / "bundles").mkdir(parents=True)
        for source in ROOT.iterdir():
            if source.name not in OWN:
                (folder / source.name).symlink_to(source)
        for name, bundle in bundles.items():
            (folder / "bundles" / name).symlink_to(bundle)
        (folder / "path/to").mkdir(parents=True)
        (folder / "path/to/folder").symlink_to(checkpoint)
        (folder / ".venv").symlink_to(sys.prefix)
        self._programs = folder.parent / "programs"
        self._programs.mkdir()
        # The environment is the one that runs this test: make must not build another.
        make = self._programs / "make"
        make.write_text(f'#!/bin/sh\nexec {shutil.which("make")} -o .venv/.export -o .venv/.test -o .venv/.npm "$@"\n')
        make.chmod(0o755)

    def execute(self, block: Block, port: int | None = None) -> list[str]:
        """What each command of the block has written to stdout; of a Python block, the whole. AssertionError if one fails."""
        port = port or free_port()
        outputs = self.folder.parent / "outputs"
        outputs.mkdir(exist_ok=True)
        if block.language == "python":
            return [self._finish([sys.executable, "-c", _at(block.text, port)], port)]
        script, count = _PRELUDE, 0
        for count, command in enumerate(commands(block), start=1):
            text = _at(command.text, port)
            if SERVES.match(text):
                script += f": > {outputs}/{count}\n{{ exec {text}\n}} > {outputs}/log 2>&1 & served $! {outputs}/log\n"
            else:
                script += f"{{ {text}\n}} > {outputs}/{count}\n"
        self._finish(["bash", "-c", script], port)
        return [(outputs / str(number)).read_text() for number in range(1, count + 1)]

    def _finish(self, command: list[str], port: int) -> str:
        path = os.pathsep.join([str(self._programs), str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "ATTNSERVE_PORT": str(port), "PORT": str(port)}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


def agrees(shown: str, written: str) -> bool:
    """Whether the output of a block is the one on the page. `...` on the page matches any text."""
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, written.strip(), re.DOTALL) is not None


def _at(text: str, port: int) -> str:
    return _ADDRESS.sub(rf"\g<1>{port}", text)
