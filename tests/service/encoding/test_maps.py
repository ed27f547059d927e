"""Attention of a served model, from a real bundle: opened when asked, waits bounded, and a pool gives what the process itself gives."""

import asyncio
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from export import contract
from models.checkpoints.published import load_checkpoint
from models.maps.model import attention_maps
from service.catalog import Catalog
from service.encoding.maps import _MOST_WAITING, AttentionMaps
from service.errors import DeadlineExceeded, Overloaded, RuntimeFailed
from service.pools.catalog import GatewayCatalog
from service.pools.host import Host
from service.settings import Settings
from tests.checkpoints import N_HEADS, N_LAYERS
from tests.service.fakes import fake_bundle
from tests.service.pool_fakes import Loopback

SAME = 1e-4  # float32 on both sides, sums in another order
TEXT = "the cat"


def from_torch(bundle: Path, ids: list[int]) -> list[np.ndarray]:
    encoder = load_checkpoint(bundle.with_name(f"{bundle.name}-checkpoint")).model.encoder
    return [each.A.numpy() for each in attention_maps(encoder, torch.tensor([ids]))]


async def test_a_graph_is_opened_at_its_first_text_and_gives_what_torch_gives(encoder_with_maps: Path) -> None:
    maps, manifest = AttentionMaps(), contract.verify(encoder_with_maps)
    assert not maps._sessions
    found = await maps.of(encoder_with_maps, manifest, [2, 5, 6, 3], [2, 0])
    assert len(maps._sessions) == 1
    wanted = from_torch(encoder_with_maps, [2, 5, 6, 3])
    assert max(np.abs(A - wanted[layer]).max() for layer, A in zip((2, 0), found, strict=True)) <= SAME
    maps.close()


async def test_waits_end_with_the_deadline_and_are_few(encoder_with_maps: Path) -> None:
    maps, manifest = AttentionMaps(), contract.verify(encoder_with_maps)
    with pytest.raises(DeadlineExceeded):
        await maps.of(encoder_with_maps, manifest, [2, 3], [0], time.monotonic() - 1)
    waiting = [asyncio.create_task(maps.of(encoder_with_maps, manifest, [2, 3], [0])) for _ in range(_MOST_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=f"{_MOST_WAITING} texts already wait for their attention weights"):
        await maps.of(encoder_with_maps, manifest, [2, 3], [0])
    assert all(len(found) == 1 for found in await asyncio.gather(*waiting))
    maps.close()


async def test_a_graph_that_fails_says_so(encoder_with_maps: Path) -> None:
    maps, manifest = AttentionMaps(), contract.verify(encoder_with_maps)
    with pytest.raises(RuntimeFailed, match="the attention graph failed; the log says why"):
        await maps.of(encoder_with_maps, manifest, [10**6], [0])
    maps.close()


# The route, in both profiles ------------------------------------------------------------------------------------------------------------


async def test_the_route(encoder_with_maps: Path, tmp_path: Path) -> None:
    """In the process, and through a gateway: the same answers and the same refusals."""
    settings = Settings(bundles=(encoder_with_maps,), threads=1)
    here = Catalog(settings)
    await asyncio.to_thread(here.load)
    here.start()
    host = Host(here)
    gateway = GatewayCatalog(settings, encoders=Loopback(host), generators=None)
    await gateway.connect()
    await asyncio.to_thread(gateway.load)
    for catalog in (here, gateway):
        await answers(catalog, encoder_with_maps)
        await refusals(catalog)
    await gateway.stop()
    await here.stop()


def asked(catalog: Catalog) -> httpx.AsyncClient:
    from service.app import build_app

    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(catalog)), base_url="http://attnserve")


async def answers(catalog: Catalog, bundle: Path) -> None:
    async with asked(catalog) as http:
        whole = (await http.post("/v1/attention", json={"input": TEXT})).json()
        assert whole["tokens"] == ["[CLS]", "the", "cat", "[SEP]"]
        assert (whole["object"], whole["model"], whole["usage"]["prompt_tokens"]) == ("attention", "tiny-encoder", 4)
        assert [layer["layer"] for layer in whole["layers"]] == list(range(N_LAYERS))
        for layer, wanted in zip(whole["layers"], from_torch(bundle, whole["token_ids"]), strict=True):
            weights = np.array(layer["weights"])
            assert (layer["attention"], layer["effective"], layer["heads"]) == ("softmax", False, list(range(N_HEADS)))
            assert np.abs(weights - wanted).max() <= SAME
            assert np.abs(weights.sum(-1) - 1).max() <= SAME
        some = (await http.post("/v1/attention", json={"model": "tiny-encoder", "input": TEXT, "layers": [-1], "heads": [1, -1]})).json()
        (last,) = some["layers"]
        assert (last["layer"], last["heads"]) == (N_LAYERS - 1, [1, N_HEADS - 1])
        assert last["weights"] == [whole["layers"][-1]["weights"][head] for head in (1, -1)]
        mean = (await http.post("/v1/attention", json={"input": TEXT, "layers": [0], "average_heads": True})).json()
        assert np.allclose(mean["layers"][0]["weights"][0], np.mean(whole["layers"][0]["weights"], axis=0), atol=1e-6)


async def refusals(catalog: Catalog) -> None:
    async with asked(catalog) as http:
        for body, param, said in (
            ({"input": "cat " * 80}, "input", "tokens, and attention is shown of at most 64; shorten it"),
            ({"input": TEXT, "layers": [3]}, "layers", "`layers` has 3, and there are 3: 0 to 2, or -1 for the last"),
            ({"input": TEXT, "heads": [-5]}, "heads", "`heads` has -5, and there are 4"),
            ({"input": TEXT, "layers": []}, "layers", "`layers` cannot be empty"),
            ({"input": ""}, "input", "`input` cannot be empty"),
            ({"input": TEXT, "layer": 1}, "layer", "is not a parameter"),
        ):
            answer = await http.post("/v1/attention", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert said in error["message"]
        half = await http.post("/v1/attention", content=b'{"input": "\\ud83d"}')
        assert half.status_code == 400, half.text
        assert (await http.post("/v1/attention", json={"input": TEXT, "model": "none"})).status_code == 404


async def test_a_bundle_without_the_graph_says_how_to_add_it(tmp_path: Path) -> None:
    from tests.service.fakes import client, fake_app

    async with client(fake_app(fake_bundle(tmp_path / "mini"))) as http:
        answer = await http.post("/v1/attention", json={"input": TEXT})
    assert answer.status_code == 400
    said = "model mini was exported without its attention graph, which gives what layers attend to: `attnserve export --checkpoint fake"
    assert answer.json()["error"]["message"].startswith(said)
