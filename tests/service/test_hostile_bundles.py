"""A bundle that is broken or hostile is refused when it is loaded, in one sentence."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from export import contract, summary
from models.checkpoints.gguf.tokenizer import SPLITS
from models.training.tokenizer import PIECES
from service.errors import TokenizationFailed
from service.tokenization import tokenizer_file as module
from service.tokenization.patterns import PUBLISHED
from service.tokenization.tokenizer_file import open_tokenizer, text_of
from tests.service.fakes import case, fake_bundle, fake_catalog

EXAMPLES = int(os.environ.get("ATTNSERVE_HOSTILE_EXAMPLES", "60"))


def rewritten(bundle: Path, change: Callable[[dict[str, Any]], None], **files: bytes) -> Path:
    """With other words in its manifest, and its fingerprint and hashes made to fit, as an attacker would."""
    for name, content in files.items():
        (bundle / f"{name}.json").write_bytes(content)
    described = json.loads((bundle / contract.MANIFEST).read_text(encoding="utf-8"))
    described.pop("fingerprint", None)
    for file in described["files"]:
        path = bundle / file["name"]
        file |= {"sha256": contract.sha256(path), "size_bytes": path.stat().st_size}
    change(described)
    try:
        text = contract.dump(contract.Manifest.model_validate(described))
    except ValueError:
        text = json.dumps(described)
    (bundle / contract.MANIFEST).write_text(text, encoding="utf-8")
    return bundle


def refusal(bundle: Path) -> str:
    with pytest.raises(contract.BundleError) as refused:
        fake_catalog(bundle).load()
    message = str(refused.value)
    assert "\n" not in message
    assert str(bundle) in message
    assert len(message) < len(str(bundle)) + 900
    return message


def nothing(described: dict[str, Any]) -> None:
    pass


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "kind is decoder and `decoder` is absent": ("encoder", {"kind": "decoder"}),
    "kind is encoder_decoder and `encoder_decoder` is absent": ("encoder", {"kind": "encoder_decoder"}),
    "the graph of this kind has the outputs logits": ("encoder", {"kind": "classifier"}),
    "has the outputs sentence_embedding": ("classifier", {"kind": "encoder"}),
    "a reranker has one label": ("classifier", {"kind": "reranker"}),
    "(B, 3), and graph.outputs": ("token_classifier", {"kind": "classifier"}),
    "files does not list model.onnx": ("encoder", {"files": []}),
    "id2label names 0 labels": ("classifier", {"id2label": {}}),
    "default_prompt='x' is not one of the prompts": ("encoder", {"default_prompt": "x"}),
    "pad_token_id=100000 is not in the vocabulary": ("encoder", {"pad_token_id": 100_000}),
    "created='yesterday' is not accepted": ("encoder", {"created": "yesterday"}),
    "created='0001-01-01T00:00:00+00:00'": ("encoder", {"created": "0001-01-01T00:00:00+00:00"}),
    "created='2026-01-01T00:00:00'": ("encoder", {"created": "2026-01-01T00:00:00"}),
    "limits.max_tokens=": ("encoder", {"limits": {"max_tokens": 2**60, "vocab_size": 10}}),
    "width=-1": ("encoder", {"width": -1}),
    "prompts": ("encoder", {"prompts": {"a": None}}),
    "parity.min_cosine": (
        "encoder",
        {"parity": {"max_abs_error": 0, "min_cosine": float("nan"), "shapes": [], "tolerance": 1}},
    ),
}


def test_a_manifest_that_contradicts_itself_or_reality_is_refused(tmp_path: Path) -> None:
    for at, (said, (kind, change)) in enumerate(CONTRADICTIONS.items()):
        with case(said):
            assert said in refusal(
                rewritten(fake_bundle(tmp_path / str(at), kind), lambda described, change=change: described.update(change))
            )


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    """A graph can name any file beside it as its weights."""
    bundle = fake_bundle(tmp_path / "bundle")
    (bundle / "model.onnx.data").write_bytes(b"weights")
    assert "has 'model.onnx.data', which its manifest does not list" in refusal(bundle)


def outside(file: Path, elsewhere: Path) -> None:
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def round_and_round(file: Path, elsewhere: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def fifo(file: Path, elsewhere: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path, elsewhere: Path) -> None:
    file.unlink()
    file.mkdir()


def device(file: Path, elsewhere: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def gone(file: Path, elsewhere: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("put", [outside, round_and_round, fifo, folder, device, gone])
def test_what_is_no_file_of_the_bundle_is_neither_read_nor_waited_for(tmp_path: Path, put: Callable[[Path, Path], None]) -> None:
    for at, name in enumerate((contract.GRAPH, contract.TOKENIZER, contract.GOLDEN, contract.MANIFEST)):
        bundle = fake_bundle(tmp_path / f"bundle-{at}")
        put(bundle / name, tmp_path / f"elsewhere-{at}")
        message = refusal(bundle)
        assert name in message
        assert put is not outside or "is a link to a place outside the bundle" in message


def test_a_path_that_no_folder_can_have_is_no_bundle() -> None:
    with pytest.raises(contract.BundleError, match="is not a bundle"):
        contract.verify(Path("/" + "x" * 5_000))


def test_files_too_large_to_be_read_are_not(tmp_path: Path) -> None:
    bundle = fake_bundle(tmp_path / "bundle")
    with (bundle / contract.MANIFEST).open("r+b") as stream:
        stream.truncate(2**40)
    assert "manifest.json has 1099511627776 bytes" in refusal(bundle)


GOLDEN = {"texts": ["the cat"], "pairs": None, "outputs": [[1.0]], "min_cosine": 0.9, "max_abs_error": None}


@pytest.mark.parametrize(
    ("golden", "said"),
    [
        ({}, "texts is missing"),
        ([], "Input should be an object"),
        (GOLDEN | {"texts": [], "outputs": []}, "at least 1 item"),
        (GOLDEN | {"outputs": []}, "has no outputs, by which the bundle is judged"),
        (GOLDEN | {"outputs": [[1.0]] * 2}, "texts has 1 and outputs has 2 entries"),
        (GOLDEN | {"sparse": [{"indices": [1, 2], "weights": [0.5]}]}, "indices has 2 and weights has 1 entries"),
        (GOLDEN | {"texts": ["a"] * 2_000, "outputs": [[1.0]] * 2_000}, "at most 1000 items"),
        (GOLDEN | {"texts": ["a", "b"], "outputs": [[1.0], [1.0, 2.0]]}, "rows of 1 to 2 numbers"),
        (GOLDEN, "has rows of 1 numbers, and the manifest width="),
        (GOLDEN | {"min_cosine": None}, "one of min_cosine and max_abs_error is needed"),
        (GOLDEN | {"min_cosine": None, "max_abs_error": 9}, "has no min_cosine"),
        (GOLDEN | {"min_cosine": None, "max_abs_error": 1e9}, "less than or equal to 1000"),
        (GOLDEN | {"min_cosine": -1}, "greater than or equal to 0.5"),
        (GOLDEN | {"outputs": [["x"]]}, "valid number"),
    ],
)
def test_golden_vectors_that_prove_nothing_are_refused(tmp_path: Path, golden: Any, said: str) -> None:
    bundle = rewritten(fake_bundle(tmp_path / "bundle"), nothing, golden=json.dumps(golden).encode())
    assert said in refusal(bundle)


def test_a_continuation_that_would_take_a_start_for_ever_is_refused(tmp_path: Path) -> None:
    golden = {"prompts": ["a"], "token_ids": [[1]], "continuations": [[1] * 200_000], "top_token_ids": [[1]], "top_logits": [[0.0]]}
    (tmp_path / contract.GOLDEN).write_text(json.dumps(golden | {"max_abs_error": 1.0}))
    with pytest.raises(contract.BundleError, match=r"continuations\.0=.* at most 1000 items"):
        contract.read_golden(tmp_path, contract.DecoderGolden)


@pytest.mark.parametrize("name", ["golden", "tokenizer", "manifest"])
def test_garbage_is_refused(tmp_path: Path, name: str) -> None:
    for at, content in enumerate((b"", b"\xff\xfe", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"null", b"9" * 10_000)):
        bundle = fake_bundle(tmp_path / str(at))
        if name == "manifest":
            (bundle / contract.MANIFEST).write_bytes(content)
        else:
            rewritten(bundle, nothing, **{name: content})
        assert f"{name}.json" in refusal(bundle), content[:10]


# Tokenizers ------------------------------------------------------------------------------------------------------------------------------


def tokenizer_file(folder: Path, **parts: Any) -> Path:
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
    }
    (folder / contract.TOKENIZER).write_text(json.dumps(described | parts))
    return folder / contract.TOKENIZER


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"\s+ "])
@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_pattern_of_no_published_tokenizer_needs_the_setting(tmp_path: Path, part: str, pattern: str) -> None:
    replacing = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    value = {"type": "Sequence", "pretokenizers": [split(pattern)]} if part == "pre_tokenizer" else replacing
    file = tokenizer_file(tmp_path, **{part: value})
    with pytest.raises(contract.BundleError, match=f"of its {part} is not one of published tokenizers, .*any_tokenizer_pattern=true"):
        open_tokenizer(file, 2)
    assert open_tokenizer(file, 2, any_pattern=True).encode("a").ids == [0]


@pytest.mark.parametrize("pattern", [*sorted(PUBLISHED), PIECES])
def test_the_patterns_of_published_tokenizers_are_accepted_and_end(tmp_path: Path, pattern: str) -> None:
    tokenizer = open_tokenizer(tokenizer_file(tmp_path, pre_tokenizer=split(pattern)), 2)
    for text in ("a" * 20_000, " " * 20_000, "1" * 20_000, "'\n" * 10_000, "é一." * 5_000):
        tokenizer.encode(text)
    assert tokenizer.encode("a").ids == [0]


@pytest.mark.parametrize("expression", SPLITS)
def test_the_tokenizers_of_gguf_files_need_no_setting(tmp_path: Path, expression: str) -> None:
    described = json.loads(SPLITS[expression]().__getstate__())
    open_tokenizer(tokenizer_file(tmp_path, pre_tokenizer=described), 2)


def test_a_tokenizer_neither_fills_nor_cuts(tmp_path: Path) -> None:
    fill = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    tokenizer = open_tokenizer(tokenizer_file(tmp_path, padding=fill, truncation=cut, pre_tokenizer={"type": "Whitespace"}), 2)
    assert tokenizer.encode("a a").ids == [0, 0]


def test_a_normalizer_that_multiplies_a_text_is_refused(tmp_path: Path) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    with pytest.raises(contract.BundleError, match="can make 10000 characters of one"):
        open_tokenizer(tokenizer_file(tmp_path, normalizer={"type": "Sequence", "normalizers": [step, step]}), 2)


@pytest.mark.parametrize(
    ("single", "said"),
    [
        ([{"SpecialToken": {"id": "a", "type_id": 0}}] * 2 + [{"Sequence": {"id": "A", "type_id": 0}}], "adds 1200 special tokens"),
        ([{"Sequence": {"id": "A", "type_id": 0}}] * 3, "has a text more than once"),
    ],
)
def test_a_template_that_multiplies_a_text_is_refused(tmp_path: Path, single: Any, said: str) -> None:
    special = {"a": {"id": "a", "ids": [0] * 600, "tokens": ["a"] * 600}}
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}
    with pytest.raises(contract.BundleError, match=f"its template `single` {said}"):
        open_tokenizer(tokenizer_file(tmp_path, post_processor=template), 2)


@pytest.mark.parametrize(
    ("content", "number", "said"), [("b", 16_385, "16385 added tokens, and 16384"), ("b" * 2_000, 1_000, "2000000 characters, and 1048576")]
)
def test_a_tokenizer_of_too_many_added_tokens_is_refused_before_it_is_built(
    content: str, number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building it takes 24 s for 300,000 tokens, and 7 s for 16,000 of 2,000 characters each."""
    token = {"id": 2, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    file = tokenizer_file(tmp_path, added_tokens=[token] * number)
    monkeypatch.setattr(module, "Tokenizer", None)
    with pytest.raises(contract.BundleError, match=said):
        open_tokenizer(file, 3)


def test_ids_at_which_the_decoder_fails_are_refused(tmp_path: Path) -> None:
    """The library panics, which is no `Exception`."""
    tokenizer = open_tokenizer(tokenizer_file(tmp_path, decoder={"type": "Strip", "content": "a", "start": 0, "stop": 2}), 2)
    with pytest.raises(TokenizationFailed, match="fails at these tokens"):
        text_of(tokenizer, [0, 0])


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(contract.BundleError, match="token 7, and the model"):
        open_tokenizer(tokenizer_file(tmp_path, model={"type": "WordLevel", "vocab": {"a": 7, "[UNK]": 1}, "unk_token": "[UNK]"}), 2)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**30, 0.5, 1e308, "", "x", "../x", "/etc/passwd", "a\nb", "\x1b[2J", "[/red]"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def places(value: Any, so_far: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Of every value in a JSON document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [so_far, *(place for key, each in inside for place in places(each, (*so_far, key)))] if so_far or inside else []


def put(document: Any, place: tuple[str | int, ...], value: Any) -> None:
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value


@pytest.mark.parametrize("kind", ["encoder", "classifier"])
def test_no_change_of_a_manifest_ends_in_anything_but_a_sentence(tmp_path: Path, kind: Any) -> None:
    """ATTNSERVE_HOSTILE_EXAMPLES sets how many are tried."""
    bundle = fake_bundle(tmp_path / "bundle", kind)
    text = (bundle / contract.MANIFEST).read_text(encoding="utf-8")
    where = [place for place in places(json.loads(text)) if place]

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.sampled_from(where), ANYTHING)
    def campaign(place: tuple[str | int, ...], value: Any) -> None:
        (bundle / contract.MANIFEST).write_text(text, encoding="utf-8")
        rewritten(bundle, lambda described: None if place == ("fingerprint",) else put(described, place, value))
        said = ""
        try:
            fake_catalog(bundle).load()
            summary.render(bundle, graph=True)
        except contract.BundleError as error:
            said = str(error)
        assert re.search(r"[\n\x1b]", said) is None

    campaign()
