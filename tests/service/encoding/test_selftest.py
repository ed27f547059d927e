"""What a bundle must show before it is served: for each check, a real bundle with the one fault that it is there for."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from export import contract
from service.catalog import Catalog
from service.encoding.selftest import measure_rate
from service.settings import Settings
from tests.service.test_hostile_bundles import nothing, rewritten


def copied(bundle: Path, folder: Path) -> Path:
    return Path(shutil.copytree(bundle, folder / bundle.name))


def refusal(bundle: Path) -> str:
    """What the start of a service says of it."""
    with pytest.raises(contract.BundleError) as refused:
        Catalog(Settings(bundles=(bundle,), threads=1)).load()
    assert "\n" not in str(refused.value)
    return str(refused.value)


class Clocked:
    """A session whose calls take `call_s`, and `token_s` more for each token, by a clock of its own."""

    provider = "CPUExecutionProvider"

    def __init__(self, call_s: float, token_s: float) -> None:
        self.now, self._call_s, self._token_s = 0.0, call_s, token_s

    def run(self, outputs: Sequence[str], ids: Sequence[list[int]], type_ids: object, *, alone: bool = True) -> dict[str, Any]:
        assert not alone
        self.now += self._call_s + self._token_s * sum(map(len, ids))
        return {}


@pytest.mark.parametrize(("call_s", "token_s", "tokens"), [(2e-4, 1e-4, 8), (0.0, 2e-4, 5), (2e-3, 1e-4, 0), (1e-5, 1e-6, 990)])
def test_a_run_is_spread_over_the_cores_if_one_core_takes_a_millisecond(
    call_s: float, token_s: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Clocked(call_s, token_s)
    monkeypatch.setattr(time, "perf_counter", lambda: session.now)
    rate = measure_rate(session, "o", 128)  # type: ignore[arg-type]
    assert rate.tokens_per_s == pytest.approx(1 / token_s)
    assert abs(rate.spread_tokens - tokens) <= 1


def spoil(graph: Path, output: str) -> None:
    """The same graph, its weights beside it as they were, whose `output` is not a number and of the same shape."""
    model = onnx.load(graph, load_external_data=False)
    for node in model.graph.node:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                if name == output:
                    names[at] = f"{output}_as_it_was"
    model.graph.initializer.append(numpy_helper.from_array(np.array(np.nan, np.float32), "not_a_number"))
    model.graph.node.append(helper.make_node("Add", [f"{output}_as_it_was", "not_a_number"], [output]))
    onnx.save(model, graph)


def test_the_attention_graph_is_asked(encoder_with_maps: Path, tmp_path: Path) -> None:
    bundle = copied(encoder_with_maps, tmp_path)
    maps = contract.read_manifest(bundle).attention_graph
    assert maps is not None
    output = contract.attention_output(1)
    spoil(bundle / maps.file, output)
    assert f"{maps.file}: self-test failed, {output} is (4, 2, 2) and should be (4, 2, 2), all of it finite" in refusal(
        rewritten(bundle, nothing)
    )


@pytest.mark.parametrize("kind", ["decoder_bundle", "encoder_decoder_bundle"])
def test_golden_texts_become_the_tokens_of_the_export(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A tokenizer that was exchanged gives good texts for the wrong tokens: no logit shows it."""
    bundle = copied(request.getfixturevalue(kind), tmp_path)
    described = json.loads((bundle / contract.TOKENIZER).read_text(encoding="utf-8"))
    described["normalizer"] = {"type": "Replace", "pattern": {"String": "e"}, "content": "a"}
    (bundle / contract.TOKENIZER).write_text(json.dumps(described), encoding="utf-8")
    assert "self-test failed, the tokenizer makes other tokens of" in refusal(rewritten(bundle, nothing))
