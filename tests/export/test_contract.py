"""A bundle is as it was exported or it is refused, and the refusal names the file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from export import contract
from export.contract.contradictions import contradictions


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Four files that look like a bundle; the graph is not one."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / contract.GRAPH).write_bytes(bytes(range(256)))
    (folder / contract.TOKENIZER).write_text("{}")
    golden = contract.Golden(texts=("a", "b"), outputs=((1.0, 0.0), (0.6, 0.8)), min_cosine=0.9999)
    (folder / contract.GOLDEN).write_text(golden.model_dump_json())
    (folder / contract.MANIFEST).write_text(contract.dump(manifest_of(folder)), encoding="utf-8")
    return folder


def manifest_of(folder: Path) -> contract.Manifest:
    paths = sorted(folder.iterdir())
    return contract.Manifest(
        name="tiny/model",
        kind="encoder",
        precision="fp32",
        files=tuple(contract.File(name=p.name, sha256=contract.sha256(p), size_bytes=p.stat().st_size) for p in paths),
        graph=contract.Graph(
            file=contract.GRAPH,
            opset=20,
            inputs=tuple(
                contract.Tensor(name=name, dtype="int64", shape=("B", "N")) for name in (contract.INPUT_IDS, contract.ATTENTION_MASK)
            ),
            outputs=(
                contract.Tensor(name=contract.EMBEDDING, dtype="float32", shape=("B", 2)),
                contract.Tensor(name=contract.POOLED, dtype="float32", shape=("B", 2)),
                contract.Tensor(name=contract.TOKEN_EMBEDDINGS, dtype="float32", shape=("B", "N", 4)),
            ),
            operators={"Gather": 1},
            optimisation="none",
        ),
        limits=contract.Limits(max_tokens=8, vocab_size=10),
        source=contract.CheckpointSource(architecture="X", checkpoint="x", weights_sha256="0" * 64, attention="softmax", untrained=False),
        parity=contract.Parity(max_abs_error=1e-6, min_cosine=1.0, shapes=((1, 2),), tolerance=1e-5),
        width=2,
        prompts={"query": "Frage: ü"},
        created="2026-11-21T10:00:00+00:00",
        tool="test",
    )


def test_a_written_manifest_reads_back_the_same(bundle: Path) -> None:
    manifest = contract.verify(bundle)
    assert contract.dump(manifest) == (bundle / contract.MANIFEST).read_text(encoding="utf-8")
    assert contract.read_golden(bundle, contract.Golden).outputs[1] == (0.6, 0.8)


@pytest.mark.parametrize("name", [contract.GRAPH, contract.TOKENIZER, contract.GOLDEN, contract.MANIFEST])
def test_one_changed_byte_anywhere_is_refused_with_the_name_of_its_file(bundle: Path, name: str) -> None:
    path = bundle / name
    original = path.read_bytes()
    for at in range(len(original)):
        path.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        with pytest.raises(contract.BundleError, match=name.replace(".", r"\.")):
            contract.verify(bundle)


def test_a_longer_file_is_refused(bundle: Path) -> None:
    with (bundle / contract.GRAPH).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(contract.BundleError, match=r"model\.onnx has 257 bytes, but the manifest has 256"):
        contract.verify(bundle)


def test_a_missing_file_is_refused(bundle: Path) -> None:
    (bundle / contract.GOLDEN).unlink()
    with pytest.raises(contract.BundleError, match=r"golden\.json is missing"):
        contract.verify(bundle)


def test_a_directory_without_a_manifest_is_told_how_to_become_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(contract.BundleError, match="attnserve export --checkpoint"):
        contract.verify(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": "attnserve.bundle/2"}'])
def test_what_is_not_a_manifest_is_refused(bundle: Path, text: str) -> None:
    (bundle / contract.MANIFEST).write_text(text)
    with pytest.raises(contract.BundleError, match=r"manifest\.json cannot be read"):
        contract.verify(bundle)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "the whole=[] is not accepted: Input should be"),
        (
            {"limits": {"max_tokens": 0, "vocab_size": 10}},
            "limits.max_tokens=0 is not accepted: Input should be greater than or equal to 1",
        ),
        ({"limits": {"max_tokens": 8}}, "limits.vocab_size is missing"),
        ({"kind": "x" * 10_000, "width": "wide"}, "kind='xxx"),
        ({"name": "a\nb"}, r"name='a\nb' is not accepted"),
    ],
)
def test_a_malformed_manifest_is_refused_with_its_first_bad_field(bundle: Path, wrong: Any, said: str) -> None:
    path = bundle / contract.MANIFEST
    path.write_text(json.dumps(wrong and {**json.loads(path.read_text(encoding="utf-8")), **wrong}))
    with pytest.raises(contract.BundleError) as refused:
        contract.read_manifest(bundle)
    message = str(refused.value)
    assert message.startswith(f"{path} cannot be read: {said}")
    assert message.endswith(". Export the bundle again.")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 300


def test_an_unknown_key_is_refused(bundle: Path) -> None:
    path = bundle / contract.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "colour": "red"}))
    with pytest.raises(contract.BundleError, match="colour"):
        contract.verify(bundle)


def test_a_decoder_may_still_have_the_graph_for_gpus_of_an_earlier_release(decoder_bundle: Path) -> None:
    manifest = contract.read_manifest(decoder_bundle)
    gpu = contract.GpuGraph(graph=manifest.graph.model_copy(update={"inputs": manifest.graph.inputs[:1]}), min_cosine=1, largest=1)
    assert list(contradictions(manifest.model_copy(update={"gpu_graph": gpu}))) == []


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".hidden", "a\\b", "", "a b", "x\n"])
def test_no_file_name_leads_out_of_the_bundle(name: str) -> None:
    with pytest.raises(ValidationError):
        contract.File(name=name, sha256="0" * 64, size_bytes=1)


def test_a_manifest_rewritten_with_another_figure_is_refused(bundle: Path) -> None:
    """The fingerprint covers the manifest's own words, not only the files."""
    path = bundle / contract.MANIFEST
    path.write_text(path.read_text(encoding="utf-8").replace('"max_tokens": 8', '"max_tokens": 9'), encoding="utf-8")
    with pytest.raises(contract.BundleError, match="does not match its fingerprint"):
        contract.verify(bundle)


@pytest.mark.parametrize("holds", [(None, None), ("count", None), ("count", "sums")])
def test_the_fingerprint_covers_what_states_hold_and_is_that_of_older_bundles_where_they_hold_nothing(
    bundle: Path, holds: tuple[contract.Holds | None, ...]
) -> None:
    def described(holds: tuple[contract.Holds | None, ...]) -> contract.Manifest:
        states = tuple(contract.StateTensor(name=f"state_0_{at}", shape=(2,), holds=each) for at, each in enumerate(holds))
        decoder = contract.Decoder(states=states, takes_positions=False, exact=True)
        return manifest_of(bundle).model_copy(update={"decoder": decoder})

    manifest = described(holds)
    states = json.loads(contract.dump(manifest))["decoder"]["states"]
    assert [state.get("holds", "absent") for state in states] == [each or "absent" for each in holds]
    assert (manifest.fingerprint == described((None, None)).fingerprint) == (holds == (None, None))


def test_a_new_field_of_decoders_leaves_the_fingerprints_of_older_bundles_as_they_were(bundle: Path) -> None:
    """The keys are those of the first manifests of decoders. If this fails, all bundles that people have are refused."""
    decoder = contract.Decoder(states=(contract.StateTensor(name="state_0_S", shape=(2,)),), takes_positions=False, exact=True)
    written = json.loads(contract.dump(manifest_of(bundle).model_copy(update={"decoder": decoder})))["decoder"]
    first = {"states", "takes_positions", "bos_token_id", "eos_token_ids", "chat_template", "exact"}
    assert written.keys() == first | {"parameters", "bits_per_byte", "fp32_bits_per_byte"}


def test_sums_in_a_last_column_need_columns() -> None:
    with pytest.raises(ValidationError, match=r"state_0_S of shape \(4,\) has no columns"):
        contract.StateTensor(name="state_0_S", shape=(4,), holds="sums_in_last_column")


def test_reading_a_bundle_needs_nothing_heavy() -> None:
    """Neither the contract nor what `attnserve inspect` shows may load torch, onnx or numpy."""
    code = "import sys, export.contract, export.summary; print({'torch', 'onnx', 'onnxruntime', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
