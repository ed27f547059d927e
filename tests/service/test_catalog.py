"""Loading bundles, finding models, being ready, and the road from inputs to rows."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from export import contract
from service.call import Call
from service.catalog import Catalog
from service.encoding.request import EncodeRequest
from service.errors import (
    BatchTooLarge,
    DeadlineExceeded,
    InputTooLong,
    ModelNotFound,
    Overloaded,
    RuntimeFailed,
    ServiceError,
    WrongKind,
)
from service.generation.model import DecoderModel
from service.settings import Settings, SettingsError
from tests.service.fakes import PATIENCE_S, FakeCatalog, client, fake_app, fake_bundle, fake_catalog
from tests.service.generation_fakes import FakeGenerator, FakeGeneratorCatalog


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return fake_bundle(tmp_path / "mini")


async def started(catalog: FakeCatalog) -> FakeCatalog:
    catalog.load()
    catalog.start()
    return catalog


def call(**fields: Any) -> Call:
    return Call("id", 0.0, **fields)


# Loading ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [contract.GRAPH, contract.TOKENIZER, contract.GOLDEN])
def test_a_changed_byte_in_any_file_stops_the_start(bundle: Path, file: str) -> None:
    content = bytearray((bundle / file).read_bytes())
    content[-1] ^= 1
    (bundle / file).write_bytes(content)
    with pytest.raises(contract.BundleError, match=f"{file} was changed after export"):
        fake_catalog(bundle).load()


def test_golden_vectors_that_do_not_come_out_stop_the_start(tmp_path: Path) -> None:
    bundle = fake_bundle(tmp_path / "mini")
    golden = json.loads((bundle / contract.GOLDEN).read_text())
    golden["outputs"][1] = [-number for number in golden["outputs"][1]]
    (bundle / contract.GOLDEN).write_text(json.dumps(golden))
    manifest = contract.read_manifest(bundle)
    files = tuple(
        file.model_copy(update={"sha256": contract.sha256(bundle / file.name), "size_bytes": (bundle / file.name).stat().st_size})
        for file in manifest.files
    )
    (bundle / contract.MANIFEST).write_text(contract.dump(manifest.model_copy(update={"files": files})))
    with pytest.raises(contract.BundleError, match=r"lowest cosine to the golden vectors -1\.0+, needed"):
        fake_catalog(bundle).load()


def test_two_bundles_of_one_name_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="both called mini"):
        fake_catalog(fake_bundle(tmp_path / "a", name="mini"), fake_bundle(tmp_path / "b", name="mini")).load()


def test_no_bundle_at_all_stops_the_start() -> None:
    with pytest.raises(contract.BundleError, match="no bundle to serve"):
        fake_catalog().load()


def test_a_model_is_found_by_name_by_alias_and_by_kind(tmp_path: Path) -> None:
    catalog = fake_catalog(fake_bundle(tmp_path / "mini"), fake_bundle(tmp_path / "rank", "reranker"), aliases={"ada": "mini"})
    catalog.load()
    assert catalog.get("mini").name == catalog.get("ada").name == catalog.get(None).name == catalog.get(None, "encoder").name == "mini"
    assert catalog.get(None, "reranker").name == "rank"
    with pytest.raises(ModelNotFound, match=r"`huge` does not exist. Served: mini, rank, ada"):
        catalog.get("huge")
    with pytest.raises(WrongKind, match="rank is of kind reranker; this route needs: encoder"):
        catalog.get("rank", "encoder")
    with pytest.raises(WrongKind):
        catalog.get(None, "classifier")


# Being ready -----------------------------------------------------------------------------------------------------------------------------


async def test_a_sick_model_is_asked_again_and_recovers_without_traffic(bundle: Path) -> None:
    """More than once: the cache knows the probe's answer from the first time, and must not be what is asked."""
    catalog = await started(fake_catalog(bundle))
    session = catalog.session("mini")
    for _ in range(3):
        session.broken = True
        with pytest.raises(RuntimeFailed):
            await catalog.get("mini").answer(EncodeRequest(inputs=[f"cat {len(session.batches)}"]), call())
        assert not await catalog.ready()
        assert not await catalog.ready()
        session.broken = False
        assert await catalog.ready()
    await catalog.stop()


async def test_a_sick_decoder_is_asked_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeGenerator("wordy")
    catalog = FakeGeneratorCatalog([model], Settings(threads=1))
    catalog.load()
    catalog.start()
    steps = model.engine.steps
    steps.failures = dict.fromkeys(range(2), RuntimeError("no memory"))
    with pytest.raises(RuntimeFailed):
        await model.probe(time.monotonic() + PATIENCE_S)
    assert not await catalog.ready()
    assert await catalog.ready()
    await catalog.stop()


# From inputs to rows ---------------------------------------------------------------------------------------------------------------------


async def test_tokenising_ends_at_the_deadline_and_its_errors_name_the_input_of_the_request(bundle: Path) -> None:
    catalog = await started(fake_catalog(bundle))
    model = catalog.get("mini")
    long = ["cat " * 20_000] * 4  # each a piece of its own
    with pytest.raises(DeadlineExceeded, match="before it was queued"):
        await model.answer(EncodeRequest(inputs=long), call(deadline=time.monotonic()))
    with pytest.raises(ServiceError, match="input 3"):
        await model.answer(EncodeRequest(inputs=[*long[:3], [10_000]]), call())
    await catalog.stop()


async def test_an_input_of_too_many_characters_is_refused_before_it_is_tokenised(bundle: Path) -> None:
    catalog = await started(fake_catalog(bundle, max_input_characters=5000))
    with pytest.raises(InputTooLong, match="input 1 has 5001 characters and the most is 5000"):
        await catalog.get("mini").answer(EncodeRequest(inputs=["cat", "x" * 5001]), call())
    await catalog.stop()


async def test_the_default_prompt_is_put_before_texts_and_not_before_ids(tmp_path: Path) -> None:
    catalog = await started(fake_catalog(fake_bundle(tmp_path / "mini", default_prompt="query")))
    model, session = catalog.get("mini"), catalog.session("mini")
    await model.answer(EncodeRequest(inputs=["cat"]), call())
    await model.answer(EncodeRequest(inputs=[[5, 6]]), call())
    await model.answer(EncodeRequest(inputs=["cat"], prompt=""), call())
    tokenizer = model.texts.tokenizer
    assert session.batches == [[tokenizer.encode("query: cat").ids], [[5, 6]], [tokenizer.encode("cat").ids]]
    await catalog.stop()


# Stopping --------------------------------------------------------------------------------------------------------------------------------


async def test_draining_waits_for_what_was_accepted_and_refuses_the_rest(bundle: Path) -> None:
    app = fake_app(bundle)
    async with client(app) as http:
        catalog = app.state.catalog
        session = catalog.session("mini")
        session.hold()
        accepted = asyncio.create_task(http.post("/v1/embeddings", json={"input": "cat"}))
        await session.entered(1)
        assert await catalog.drain(0) == 1
        draining = asyncio.create_task(catalog.drain(PATIENCE_S))
        refused = await http.post("/v1/embeddings", json={"input": "dog"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "shutting down" in refused.json()["error"]["message"]
        assert (await http.get("/health/ready")).status_code == 503
        assert (await http.get("/health/live")).status_code == 200
        session.open()
        assert await draining == 0
        assert (await accepted).status_code == 200


async def test_an_item_error_before_a_refusal_does_not_hide_the_refusal(bundle: Path) -> None:
    catalog = await started(fake_catalog(bundle, max_queue_tokens=10, threads=1))
    model, session = catalog.get("mini"), catalog.session("mini")
    session.hold()
    tasks = [asyncio.create_task(model.answer(EncodeRequest(inputs=["cat"]), call()))]
    await session.entered(1)
    tasks.append(asyncio.create_task(model.answer(EncodeRequest(inputs=["dog fish bird"]), call())))
    await asyncio.sleep(0)
    seen: dict[int, object] = {}
    with pytest.raises(Overloaded):
        await model.answer(EncodeRequest(inputs=["", "one two three four five six"]), call(item_errors=True), seen.__setitem__)
    assert not seen
    session.open()
    await asyncio.gather(*tasks)
    await catalog.stop()


# While it runs ---------------------------------------------------------------------------------------------------------------------------


async def test_live_settings_change_for_the_next_request_and_others_do_not(bundle: Path) -> None:
    catalog = await started(fake_catalog(bundle))
    catalog.reconfigure({"max_client_batch": 1})
    with pytest.raises(BatchTooLarge, match="maximum allowed batch size 1"):
        await catalog.get("mini").answer(EncodeRequest(inputs=["a", "b"]), call())
    with pytest.raises(SettingsError, match="max_client_batch='many' is not accepted"):
        catalog.reconfigure({"access_log": True, "max_client_batch": "many"})
    with pytest.raises(SettingsError, match="threads cannot change while the service runs"):
        catalog.reconfigure({"access_log": True, "threads": 1})
    assert (catalog.settings.max_client_batch, catalog.settings.access_log) == (1, False)
    await catalog.stop()


async def test_a_run_that_does_not_end_makes_its_model_unready_until_it_ends(bundle: Path) -> None:
    app = fake_app(bundle, stuck_after_s=0.05)
    async with client(app) as http:
        catalog = app.state.catalog
        session = catalog.session("mini")
        assert catalog.sick() is None
        session.hold()
        asking = asyncio.create_task(http.post("/v1/embeddings", json={"input": "cat"}))
        await session.entered(1)
        async with asyncio.timeout(PATIENCE_S):
            while (reason := catalog.sick()) is None:  # noqa: ASYNC110  time itself is what is waited for
                await asyncio.sleep(0.01)
        assert "a runtime call of mini has not ended for" in reason
        refused = await http.post("/v1/embeddings", json={"input": "dog"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "a runtime call of mini has not ended for" in refused.json()["error"]["message"]
        unready = await http.get("/health/ready")
        assert (unready.status_code, unready.text.split(" for ")[0]) == (503, "a runtime call of mini has not ended")
        assert (await http.get("/health/live")).status_code == 200
        session.open()
        assert (await asking).status_code == 200
        assert catalog.sick() is None
        assert (await http.get("/health/ready")).status_code == 200


@pytest.mark.parametrize(("interval_s", "wait_s"), [(0.03, 0.00375), (10, 0.004), (0, 0)])
def test_tokens_wait_for_the_hand_over_as_the_interval_of_streams_allows(decoder_bundle: Path, interval_s: float, wait_s: float) -> None:
    """0.03 s is the default."""
    assert Settings.model_fields["stream_interval_s"].default == 0.03
    catalog = Catalog(Settings(bundles=(decoder_bundle,), threads=1, stream_interval_s=interval_s))
    catalog.load()
    (model,) = catalog.models.values()
    assert isinstance(model, DecoderModel)
    assert model.engine.limits.hand_over_s == wait_s
