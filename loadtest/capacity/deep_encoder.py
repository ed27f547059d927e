"""A second encoder for the capacity page: all-MiniLM-L6-v2's shape with twice its layers. Its weights are drawn, since cost does not depend
on them, and its tokenizer is that of another bundle, so that the same texts are as many tokens."""

import json
import subprocess
import sys
from pathlib import Path

from loadtest.errors import LoadtestError

NAME = "encoder-12-layers"
_MODEL = {"d_model": 384, "n_layers": 12, "n_heads": 12, "d_feedforward": 1536, "n_positions": 256}


def deeper(tokenizer: Path, folder: Path) -> Path:
    """Its bundle below `folder`, exported unless it is there. `tokenizer` is a bundle. LoadtestError when the export fails."""
    bundle, config = folder / NAME, folder / f"{NAME}.json"
    if not bundle.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps({"model": _MODEL, "tokenizer": str(tokenizer.resolve())}))
        command = [sys.executable, "-m", "service.cli", "export", "--config", str(config), "--out", str(bundle), "--name", NAME]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode:
            raise LoadtestError(f"{NAME} could not be exported: {(made.stderr or made.stdout).strip()[-500:]}")
    return bundle
