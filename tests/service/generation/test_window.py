"""A decoder that attends to a window, served: its states are updated in place, cut to what is used, and say when the window is passed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from export import contract
from service.app import build_app
from service.catalog import Catalog
from service.generation.engine import slots_within
from service.generation.session import HostStates
from service.generation.slots import Row, Slots
from service.settings import Settings
from tests.decoders import tiny_decoder_bundle
from tests.service.fakes import PATIENCE_S

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
WINDOW, FIRST, PIECE = 16, 2, 240  # 256 slots, of which 253 are written again and again
BLOCK, SLOTS = 64, 1280
DECODER = contract.Decoder(
    states=(
        contract.StateTensor(name="state_0_k", shape=(1, SLOTS, 2), slots=True),
        contract.StateTensor(name="state_0_n", shape=(1,)),
    ),
    takes_positions=True,
    slot_block=BLOCK,
    exact=True,
)


class Memory:
    """As much of a session as slots need."""

    def states(self, rows: int) -> HostStates:
        return HostStates(DECODER, rows)


def fed(slots: Slots[str], tokens: int) -> None:
    """Feed the same number of tokens to every row. Token t writes t to its slot; n counts the tokens."""
    slots.reserve(tokens)
    states, out = slots.sets
    for row in range(len(slots)):
        t = slots.positions[row] + np.arange(tokens)
        out.arrays[0][row, 0, t + 1] = t[:, None]
        out.arrays[1][row] = states.arrays[1][row] + tokens
    slots.stepped(np.full(len(slots), tokens))


def test_tensors_with_slots_are_one_memory_that_grows_with_the_longest_row_and_shrinks_again() -> None:
    slots: Slots[str] = Slots(Memory(), 3)
    slots.add("a")
    fed(slots, 100)
    front, back = slots.sets
    assert front.arrays[0] is back.arrays[0]
    assert front.arrays[1] is not back.arrays[1]
    assert front.arrays[0].shape == (3, 1, 2 * BLOCK, 2)
    before = slots.state(0)
    assert [tensor.shape for tensor in before] == [(1, 101, 2), (1,)], "cut to the slots in use"
    slots.add("b", [np.full((1, 601, 2), 7, np.float32), np.array([600], np.float32)], 600)
    assert slots.moved == 2
    assert slots.sets[0].arrays[0] is slots.sets[1].arrays[0]
    assert slots.sets[0].arrays[0].shape == (3, 1, 12 * BLOCK, 2)
    assert all(np.array_equal(x, y) for x, y in zip(before, slots.state(0), strict=True))
    fed(slots, 1)
    assert [state[0].shape[1] for state in map(slots.state, (0, 1))] == [102, 602]
    other: Slots[str] = Slots(Memory(), 1)
    other.add("b", Row(slots, 1), 601)
    assert np.array_equal(other.state(0)[0], slots.state(1)[0])
    kept = slots.state(0)
    slots.remove(1)
    fed(slots, 1)
    assert slots.sets[0].arrays[0] is slots.sets[1].arrays[0]
    assert slots.sets[0].arrays[0].shape == (3, 1, 2 * BLOCK, 2), "the long sequence has gone, and its memory too"
    assert np.array_equal(slots.state(0)[0][:, :102], kept[0])
    fed(slots, 500)
    slots.remove(0)
    assert slots.sets[0].arrays[0].shape == (3, 1, BLOCK, 2), "no sequence is left"


@pytest.mark.parametrize(("position", "slots"), [(0, 64), (63, 64), (64, 128), (255, 256), (256, 512), (512, 768), (9_999, 1280)])
def test_states_have_the_fewest_slots_that_a_sequence_needs(position: int, slots: int) -> None:
    states = HostStates(DECODER, 1)
    states.reserve(position, 1)
    assert states.n_slots == slots


@pytest.mark.parametrize(("before", "after", "slots"), [(128, 20, 64), (190, 20, 64), (300, 200, 256), (190, 100, 192), (300, 256, 512)])
def test_slots_are_given_back_when_half_of_them_would_do(before: int, after: int, slots: int) -> None:
    """Each step reads all slots: SmolLM2's of 8 rows takes 15 ms with 64 of them, and 20 with 192."""
    states = HostStates(DECODER, 1)
    states.reserve(before, 1)
    states.reserve(after, 1)
    assert states.n_slots == slots


def test_a_manifest_without_slot_block_is_of_a_graph_that_takes_256_slots_at_a_time() -> None:
    older = contract.Decoder.model_validate(DECODER.model_dump(exclude={"slot_block"}))
    assert HostStates(older, 1).n_slots == 256


def test_large_states_take_fewer_slots() -> None:
    settings = Settings(bundles=(Path("x"),), slots=32, slot_bytes=10 * DECODER.state_bytes)
    assert slots_within(settings, DECODER) == 10
    assert slots_within(settings.model_copy(update={"slot_bytes": 1}), DECODER) == 1
    assert slots_within(settings.model_copy(update={"slots": 3}), DECODER) == 3


OPTIONS = {
    "sink_window": {"n_first": FIRST, "piece": PIECE, "n_kv_heads": 1},
    "causal_hybrid": {"n_first": FIRST, "piece": PIECE - 1, "n_kv_heads": 1},
}
LONGER = {"window": 300, "n_first": FIRST, "piece": 212, "n_kv_heads": 1}  # 512 slots


@pytest.fixture(scope="module", params=["sink_window", "causal_hybrid", "both"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window alone, one beside sums that take the tokens that leave it, from their slots, and layers of both, one window longer."""
    if request.param == "both":
        shape = {"layers": ("causal_hybrid", "sink_window"), "n_layers": 2, "layer_options": OPTIONS | {"sink_window": LONGER}}
    else:
        shape = {"layers": request.param, "layer_options": {request.param: OPTIONS[request.param]}}
    shape |= {"window": WINDOW}
    return tiny_decoder_bundle(tmp_path_factory.mktemp("window") / "bundle", chat_template=TEMPLATE, **shape)


@pytest.fixture
async def http(bundle: Path) -> AsyncIterator[httpx.AsyncClient]:
    catalog = Catalog(Settings(bundles=(bundle,), threads=1, slots=3, states="memory"))
    await asyncio.to_thread(catalog.load)
    catalog.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(catalog)), base_url="http://attnserve") as client:
        yield client
    await catalog.stop()


async def completed(http: httpx.AsyncClient, prompt: str, max_tokens: int, **more: object) -> dict[str, object]:
    body = {"model": "tiny-decoder", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.7, "seed": 1, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body | more, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


async def test_texts_beyond_the_window_and_the_slots_are_the_same_alone_among_others_and_from_a_state(http: httpx.AsyncClient) -> None:
    """The slots are written again from the 254th token on. Five texts share three slots of the engine, so they are preempted too."""
    prompts = ["a" * 300, "b", "c" * 9, "d" * 120, "e" * 700]
    together = await asyncio.gather(*(completed(http, prompt, 150) for prompt in prompts))
    texts = [answer["choices"][0]["text"] for answer in together]  # type: ignore[index]
    assert texts == [(await completed(http, prompt, 150, cache_salt="alone"))["choices"][0]["text"] for prompt in prompts]  # type: ignore[index]
    half = await completed(http, prompts[0], 70, store_state=True)
    rest = await completed(http, "", 80, state=half["state"]["id"])  # type: ignore[index]
    begun, ended = half["choices"][0]["text"], rest["choices"][0]["text"]  # type: ignore[index]
    assert begun + ended == texts[0]


def test_an_axis_of_the_graph_has_one_number_of_slots(bundle: Path) -> None:
    manifest = contract.read_manifest(bundle)
    assert manifest.decoder is not None
    most = max(manifest.decoder.slot_counts)
    wanted = {state.name: "S" if state.shape[1] == most else f"S{state.shape[1]}" for state in manifest.decoder.states if state.slots}
    axes = {tensor.name: tensor.shape[2] for tensor in manifest.graph.inputs if tensor.name in wanted}
    assert axes == wanted
    assert len(set(wanted.values())) == len({state.shape[1] for state in manifest.decoder.states if state.slots})


def attends(bundle: Path) -> str:
    """The end of a warning. Layers of one kind forget what has left the window."""
    forgets = contract.read_manifest(bundle).source.attention == "sink_window"
    between = "may ignore what stands between" if forgets else "may miss details of what stands between, which is summed up"
    return f"the model attends in full to 16 of them, the first 2 and the last 14: the answer {between}"


async def test_an_answer_says_that_the_window_is_passed(http: httpx.AsyncClient, bundle: Path) -> None:
    assert "warnings" not in await completed(http, "a" * 10, WINDOW - 10)
    answer = await completed(http, "a" * 10, WINDOW - 9, store_state=True)
    assert answer["warnings"] == [f"the text has 17 tokens and {attends(bundle)}"]
    more = await completed(http, "a", 2, state=answer["state"]["id"])  # type: ignore[index]
    assert more["warnings"] == [f"the text has 20 tokens and {attends(bundle)}"], "the tokens of the state count"


async def test_every_dialect_says_it(http: httpx.AsyncClient, bundle: Path) -> None:
    async def asked(path: str, max_tokens: int) -> dict[str, object]:
        if path == "/generate":
            body: dict[str, object] = {"inputs": "a" * 10, "parameters": {"max_new_tokens": max_tokens, "ignore_eos": True, "seed": 1}}
        else:
            body = {"input": "a" * 10, "max_output_tokens": max_tokens, "ignore_eos": True, "seed": 1, "store": False}
        answer = await http.post(path, json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found

    for path in ("/generate", "/v1/responses"):
        assert "warnings" not in await asked(path, 2)
        assert (await asked(path, 10))["warnings"] == [f"the text has 20 tokens and {attends(bundle)}"]
