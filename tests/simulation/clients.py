"""Clients: they continue states, keep new ones, fork, delete, move names, read slowly and leave early."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from service.call import Call
from service.errors import NameMoved, ServiceError, StateNotFound
from service.generation.request import Delta, GenerationRequest, Grammar, Sampling
from service.generation.runs import Runs
from service.states.record import Keep, NameChange, StateRecord, StateReference
from tests.simulation import plain
from tests.simulation.engines import FINGERPRINT, NUMERICS
from tests.simulation.history import Kept, NameOperation, wrong_stream
from tests.simulation.network import MODEL

if TYPE_CHECKING:
    from tests.simulation.world import World

_RANDOM = Sampling(seed=0, temperature=1.0, top_k=40, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.3)
KINDS: tuple[dict[str, Any], ...] = (
    {"sampling": Sampling(seed=0, temperature=0)},
    {"sampling": _RANDOM},
    {"sampling": _RANDOM, "top_logprobs": 2},
    {"sampling": _RANDOM, "stop": ("e", "th"), "min_tokens": 4},
    {"sampling": _RANDOM, "grammar": Grammar(kind="regex", source="([a-z]{3} ){6}")},
    {"sampling": Sampling(seed=0), "grammar": Grammar(kind="lark", source='start: "(" ITEM ("," ITEM)* ")"\nITEM: /[a-z]{1,3}[0-9]/')},
    {"sampling": replace(_RANDOM, logit_bias={70: 3.0}), "stop_token_ids": (3, 4, 70)},
)
_NAME = "chat"
_ATTEMPTS = 3
_SLOW_S = 0.05


class Client:
    """One client of a tenant. `live` makes all of its requests."""

    def __init__(self, world: "World", name: str, tenant: str) -> None:
        self._world = world
        self._random = world.loop.random
        self.name = name
        self.tenant = tenant

    async def live(self) -> None:
        for _ in range(self._random.randint(1, 3)):
            await asyncio.sleep(self._world.loop.soon(0.05))
            states = self._world.history.of(self.tenant)
            kind = self._random.random()
            if states and kind < 0.12:
                await self._fork(self._random.choice(states))
            elif states and kind < 0.2 and not self._world.named:
                await self._delete(self._random.choice(states))
            elif states and kind < 0.4 and self._world.named:
                await self._move(self._random.choice(states))
            else:
                await self._turn(self._random.choice(states) if states and self._random.random() < 0.75 else None)

    # A turn -------------------------------------------------------------------------------------------------------------------------

    async def _turn(self, parent: Kept | None) -> None:
        chance = self._random
        size = chance.choice((1, 2, 5, 40)) if parent is None or chance.random() < 0.8 else 0
        prompt = tuple(chance.randrange(1, 290) for _ in range(size))
        if size and self._world.prompts and chance.random() < 0.4:  # begin like an earlier prompt, whose state may be cached
            earlier = chance.choice(self._world.prompts)
            prompt = (earlier[: chance.choice((20, len(earlier)))] + prompt)[: chance.choice((len(earlier), 120))]
        if prompt:
            self._world.prompts.append(prompt)
        first = GenerationRequest(
            prompt=prompt,
            max_tokens=chance.choice((0, 1, 6, 12, 30)) if size else chance.choice((1, 6, 30)),
            client=self.name,
            tenant=self.tenant,
            start=None if parent is None else StateReference(self.tenant, parent.id),
            **chance.choice(KINDS),
        )
        n = chance.choice((1, 1, 2, 3))
        requests = [replace(first, sampling=replace(first.sampling, seed=chance.randrange(2**32))) for _ in range(n)]
        before = () if parent is None else parent.ids
        expected = [plain.outcome(request, before) for request in requests]
        keeps = chance.random() < 0.7 or not first.max_tokens
        for _ in range(_ATTEMPTS):
            kept = [self._kept((*before, *prompt, *each.ids), parent, keeps) for each in expected]
            change = NameChange(_NAME, await self._version()) if keeps and self._world.named and n == 1 and chance.random() < 0.5 else None
            asked = [
                request if state is None else replace(request, keep=self._keep(state, change))
                for request, state in zip(requests, kept, strict=True)
            ]
            if await self._read(asked, expected, kept, change):
                self._world.prompts += [(*prompt, *each.ids) for each in expected]
                return

    async def _read(
        self, requests: list[GenerationRequest], expected: list[plain.Outcome], kept: list[Kept | None], change: NameChange | None
    ) -> bool:
        """Stream the runs. Return False if the request failed and is to be sent again."""
        world, chance = self._world, self._random
        leaves = world.leaves and chance.random() < 0.3
        slow = world.slow and chance.random() < 0.5
        made: list[list[Delta]] = [[] for _ in requests]
        begun, runs, error = world.loop.now, None, None
        call = Call(self.name, begun, session=self.name if chance.random() < 0.5 else "", client=self.name)
        try:
            if leaves and chance.random() < 0.2:
                async with asyncio.timeout(world.loop.soon(0.01)):
                    runs = await self._submit(requests, call)
            else:
                runs = await self._submit(requests, call)
            while not runs.done:
                for at, delta in await runs.take(1.0, interval_s=0.0 if chance.random() < 0.5 else 0.01):
                    made[at].append(delta)
                    world.loop.log(f"{self.name} {at} {delta.token_ids} {delta.text!r} {delta.finish_reason}")
                    if delta.finish_reason is not None and (state := kept[at]) is not None:
                        state.acknowledged = True
                        world.stats["kept"] += 1
                if leaves and chance.random() < 0.2:
                    break
                if slow:
                    await asyncio.sleep(world.loop.soon(_SLOW_S))
        except ServiceError as caught:
            error = caught
            world.saw(self.name, caught)
        except TimeoutError:
            world.loop.log(f"{self.name} leaves before its runs are accepted")
        finally:
            if runs is not None:
                runs.close()
                world.stats["cached tokens"] += runs.cached_tokens
        for deltas, outcome in zip(made, expected, strict=True):
            if (wrong := wrong_stream(deltas, outcome)) is not None:
                world.violated(f"{self.name}: {wrong}")
        world.stats["runs"] += sum(bool(deltas) and deltas[-1].finish_reason is not None for deltas in made)
        if change is not None and kept[0] is not None:
            self._note(begun, change, kept[0].id, moved=kept[0].acknowledged, refused=isinstance(error, NameMoved))
        return error is None

    async def _submit(self, requests: list[GenerationRequest], call: Call) -> Runs:
        return await Runs.submit(self._world.model, requests, call, n=len(requests), prompt_field="prompt", stream=True)

    def _kept(self, ids: tuple[int, ...], parent: Kept | None, keeps: bool) -> Kept | None:
        if not keeps:
            return None
        kept = Kept(f"state_{self._random.getrandbits(128):032x}", self.tenant, ids, None if parent is None else parent.id)
        self._world.history.expect(kept)
        return kept

    def _keep(self, kept: Kept, change: NameChange | None) -> Keep:
        return Keep(record=self._record(kept, "prompt" if kept.parent is None else "continuation"), quota=self._world.quota, name=change)

    def _record(self, kept: Kept, origin: Any) -> StateRecord:
        now = self._world.loop.epoch
        return StateRecord(
            id=kept.id,
            tenant=kept.tenant,
            model=MODEL,
            fingerprint=FINGERPRINT,
            numerics=NUMERICS,
            position=len(kept.ids),
            parent=kept.parent,
            origin=origin,
            created=now,
            used=now,
        )

    # Other requests -------------------------------------------------------------------------------------------------------------------

    async def _fork(self, parent: Kept) -> None:
        kept = self._kept(parent.ids, parent, keeps=True)
        assert kept is not None
        record = self._record(kept, "fork")
        try:
            await self._world.store.call(lambda engine: engine.put(record, None, quota=self._world.quota))
        except ServiceError as error:
            self._world.saw(self.name, error)
        else:
            kept.acknowledged = True
            self._world.stats["forks"] += 1

    async def _delete(self, state: Kept) -> None:
        state.may_be_gone = True
        try:
            await self._world.store.call(lambda engine: engine.delete(self.tenant, state.id))
        except ServiceError as error:
            self._world.saw(self.name, error)

    async def _version(self) -> int:
        """Return the name's version, which a compare-and-set expects."""
        begun = self._world.loop.now
        try:
            found = await self._world.store.call(lambda engine: engine.name(self.tenant, _NAME))
        except StateNotFound:
            self._operations.append(NameOperation(begun, self._world.loop.now, None, 0))
            return 0
        except ServiceError as error:
            self._world.saw(self.name, error)
            return 0
        self._operations.append(NameOperation(begun, self._world.loop.now, None, found.version, found.state))
        return found.version

    async def _move(self, state: Kept) -> None:
        change, begun = NameChange(_NAME, await self._version()), self._world.loop.now
        moved = refused = False
        try:
            await self._world.store.call(lambda engine: engine.move(self.tenant, change, state.id))
            moved = True
        except ServiceError as error:
            refused = isinstance(error, NameMoved)
            self._world.saw(self.name, error)
        self._note(begun, change, state.id, moved=moved, refused=refused)

    def _note(self, begun: float, change: NameChange, state: str, *, moved: bool, refused: bool) -> None:
        assert change.version is not None
        version = change.version + 1 if moved else None
        self._operations.append(NameOperation(begun, self._world.loop.now, change.version, version, state, failed=refused))
        self._world.stats["moves"] += moved

    @property
    def _operations(self) -> list[NameOperation]:
        return self._world.history.names.setdefault((self.tenant, _NAME), [])
