"""Equal fingerprints of the arithmetic promise equal bits: the fingerprint stays where the bits do, and changes with any of them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from export import contract
from service.generation.selftest import check_golden
from service.generation.session import OnnxStepSession
from service.states.numerics import numerics_fingerprint
from tests.imports import ROOT
from tests.service.fakes import PATIENCE_S

PARTS = {"graph_sha256": "ab", "runtime_version": "1.31.0", "provider": "CPUExecutionProvider", "golden_logits": "cd", "sampler": 1}
# What `checksum` does, without the imports of this file.
CODE = """
import sys
from pathlib import Path
from export import contract
from service.generation.selftest import check_golden
from service.generation.session import OnnxStepSession
bundle = Path(sys.argv[1])
print(check_golden(bundle, OnnxStepSession(bundle, contract.read_manifest(bundle), threads=1)))
"""


@pytest.fixture
def bundle(decoder_bundle: Path) -> Path:
    return decoder_bundle


def checksum(bundle: Path, threads: int) -> str:
    return check_golden(bundle, OnnxStepSession(bundle, contract.read_manifest(bundle), threads=threads))


def test_it_differs_with_every_part() -> None:
    all_of_them = {numerics_fingerprint(**PARTS), *(numerics_fingerprint(**(PARTS | {name: "e"})) for name in PARTS)}
    assert len(all_of_them) == 1 + len(PARTS)
    assert all(len(each) == 16 and set(each) <= set("0123456789abcdef") for each in all_of_them)
    assert numerics_fingerprint("a", "bc", "d", "e", 1) != numerics_fingerprint("ab", "c", "d", "e", 1)


def test_the_logits_checksum_is_that_of_any_start_and_any_number_of_threads(bundle: Path) -> None:
    other = subprocess.run([sys.executable, "-c", CODE, bundle], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=True)
    assert {checksum(bundle, 1), checksum(bundle, 2), checksum(bundle, 3), other.stdout.strip()} == {checksum(bundle, 2)}


@pytest.mark.parametrize("call", [0, -1])
def test_one_bit_of_any_logits_changes_the_checksum(bundle: Path, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, run = checksum(bundle, 1), OnnxStepSession.run
    golden = contract.read_golden(bundle, contract.DecoderGolden)
    n_calls, calls = sum(1 + len(each) for each in golden.continuations), []

    def off_by_a_bit(self: Any, *arguments: Any) -> Any:
        logits = run(self, *arguments)
        calls.append(len(calls))
        if calls[-1] == call % n_calls:
            logits.view("uint32")[0, 0, 7] ^= 1
        return logits

    monkeypatch.setattr(OnnxStepSession, "run", off_by_a_bit)
    assert checksum(bundle, 1) != before
    assert len(calls) == n_calls
