"""When Serve may count on a gateway: `WarmIngress`."""

import asyncio

import pytest

from service.catalog import Catalog
from service.deployment import replica
from service.deployment.ingress import WarmIngress
from service.settings import Settings


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    made = Catalog(Settings())
    monkeypatch.setattr(replica, "catalog", made)
    return made


def check() -> asyncio.Task[None]:
    return asyncio.create_task(WarmIngress().check_health())


async def test_a_gateway_counts_when_its_models_answer(catalog: Catalog) -> None:
    checking = check()
    await asyncio.sleep(0)
    assert not checking.done()
    catalog.warm.set()
    await checking
    await check()


async def test_a_gateway_whose_models_never_will_answer_says_why(catalog: Catalog) -> None:
    checking = check()
    catalog.failure = "the service cannot start: no such bundle"
    catalog.warm.set()
    with pytest.raises(RuntimeError, match="no such bundle"):
        await checking
