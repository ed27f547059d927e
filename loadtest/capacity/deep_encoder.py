"""Exports a second encoder for docs/capacity.md: the shape of all-MiniLM-L6-v2 with twice the layers. Its weights are random, because they
do not affect the cost. It has the tokenizer of the page's first encoder, so that a text has the same number of tokens in both.
"""

import json
import subprocess
import sys
from pathlib import Path

from loadtest.errors import LoadtestError

NAME = "encoder-12-layers"
_MODEL = {"d_model": 384, "n_layers": 12, "n_heads": 12, "d_feedforward": 1536, "n_positions": 256}


def deep_encoder(tokenizer: Path, folder: Path) -> Path:
    """Export the encoder into `folder` with the tokenizer of the bundle `tokenizer`, unless it exists there. Return its bundle. Raises
    LoadtestError if the export fails."""
    bundle, config = folder / NAME, folder / f"{NAME}.json"
    if not bundle.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps({"model": _MODEL, "tokenizer": str(tokenizer.resolve())}))
        command = [sys.executable, "-m", "service.cli", "export", "--config", str(config), "--out", str(bundle), "--name", NAME]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode:
            raise LoadtestError(f"{NAME} could not be exported: {(made.stderr or made.stdout).strip()[-500:]}")
    return bundle
