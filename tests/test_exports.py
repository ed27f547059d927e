"""A bundle of tests is exported once for its checkpoint, options and code, and the folder of such bundles does not grow without end."""

import shutil
from pathlib import Path

import pytest

from export import contract
from tests import exports
from tests.checkpoints import tiny_encoder

Calls = list[dict[str, object]]


@pytest.fixture
def calls(encoder_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The options of every export that runs."""
    found: Calls = []

    def export_bundle(checkpoint: Path, out: Path, **options: object) -> None:
        found.append(options)
        if options.get("precision") == "int8":
            raise KeyboardInterrupt
        shutil.copytree(encoder_bundle, out)

    monkeypatch.setattr(exports, "export_bundle", export_bundle)
    monkeypatch.setattr(exports, "CACHE", tmp_path / "cache")
    return found


def test_the_same_checkpoint_is_exported_once_and_each_bundle_has_its_own_names(calls: Calls, tmp_path: Path) -> None:
    for name in ("one", "other"):
        exports.exported(tiny_encoder(tmp_path / f"{name}-checkpoint"), tmp_path / name, maps=False)
        manifest = contract.verify(tmp_path / name)
        assert (manifest.name, manifest.source.checkpoint) == (name, f"{name}-checkpoint")
    assert calls == [{"maps": False}]


def test_another_checkpoint_option_or_code_is_exported_anew(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_encoder(tmp_path / "checkpoint")
    exports.exported(checkpoint, tmp_path / "bundle")
    exports.exported(tiny_encoder(tmp_path / "another", seed=1), tmp_path / "bundle")
    exports.exported(checkpoint, tmp_path / "bundle", maps=True)
    monkeypatch.setattr(exports, "_code", lambda: "changed")
    exports.exported(checkpoint, tmp_path / "bundle")
    assert len(calls) == 4


def test_an_export_that_fails_leaves_no_bundle(calls: Calls, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        exports.exported(tiny_encoder(tmp_path / "checkpoint"), tmp_path / "bundle", precision="int8")
    assert [path for path in exports.CACHE.iterdir() if path.is_dir()] == []


def test_the_bundles_that_were_not_used_for_longest_are_removed(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = [tiny_encoder(tmp_path / str(seed), seed=seed) for seed in range(3)]
    exports.exported(checkpoints[0], out := tmp_path / "bundle")
    monkeypatch.setattr(exports, "MOST_BYTES", 2.5 * sum(file.stat().st_size for file in out.iterdir()))
    for seed in (1, 0, 2, 0, 1):  # 0 is used again before 2 needs room
        exports.exported(checkpoints[seed], out)
    assert len(calls) == 4, "0, 1, 2, and 1 once more"
