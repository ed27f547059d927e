"""A file of keys as `attnserve serve` ships it: read by the process that answers, and again when it changes."""

import json
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from service.cli import app as command
from tests.service.fakes import PATIENCE_S
from tests.service.live import live

CHANGED_WITHIN_S = 120  # it is looked at every second


def new_key(file: Path, name: str) -> str:
    asked = ["key", name, "--tenant", "acme", "--file", str(file), "--requests-per-minute", "6000"]
    return CliRunner().invoke(command, asked).stdout.strip()


@pytest.mark.live
def test_a_key_is_rotated_without_a_restart(encoder_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    old = new_key(file, "old")
    with live([encoder_bundle], "--api-keys-file", str(file), "--access-log") as service:

        def ask(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(f"{service.url}/v1/embeddings", json={"input": "a"}, headers=headers, timeout=PATIENCE_S)

        def becomes(key: str, status: int) -> None:
            deadline = time.monotonic() + CHANGED_WITHIN_S
            while ask(key).status_code != status:
                assert time.monotonic() < deadline
                time.sleep(0.1)

        assert ask("sk-unknown-0123456789").status_code == 401
        answer = ask(old)
        assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "6000")
        new = new_key(file, "new")
        becomes(new, 200)
        left = [each for each in json.loads(file.read_text()) if each["name"] == "new"]
        fresh = tmp_path / "fresh.json"
        fresh.write_text(json.dumps(left))
        fresh.replace(file)
        becomes(old, 401)
        used = httpx.get(f"{service.url}/v1/usage", headers={"authorization": f"Bearer {new}"}, timeout=PATIENCE_S).json()
        assert (used["tenant"], used["key"]) == ("acme", "new")
        assert used["requests"] >= 2
    assert '"tenant": "acme", "key": "old"' in service.output
    assert not any(key in service.output for key in (old, new))
