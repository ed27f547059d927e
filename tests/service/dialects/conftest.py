"""Dialects with an engine in their own process or a pool of engines; and OpenAI's own client, with the server it talks to."""

from collections.abc import Iterator
from inspect import iscoroutinefunction

import httpx
import openai
import pytest
import pytest_asyncio

from service.app import Application
from tests.service import fakes
from tests.service.dialects.asking import Route
from tests.service.fakes import PATIENCE_S, app_of, serve_in_thread, until
from tests.service.generation_fakes import FakeGenerator, generator_app
from tests.service.live import LiveService


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `pool` twice: with an engine in its own process, and with a pool of engines."""
    if "where" in metafunc.fixturenames:
        pooled = metafunc.definition.get_closest_marker("pool")
        here = pytest.param("here", id=None if pooled else pytest.HIDDEN_PARAM)
        metafunc.parametrize("where", [here, "pool"] if pooled else [here], indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share an application share its event loop."""
    for item in items:
        if isinstance(item, pytest.Function) and iscoroutinefunction(item.function) and "shared" in item.fixturenames:
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture(scope="module", autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the engines of all applications are that tests of this module make."""
    fakes.pooled = request.param == "pool"
    yield request.param
    fakes.pooled = False


@pytest_asyncio.fixture(loop_scope="module")
async def service(shared: Route) -> Route:
    """The route that all tests of a module share; its application has forgotten everything."""
    for model in shared.app.state.generators.values():
        model.engine.forget()
        await until(lambda engine=model.engine: not engine.pending)
    return shared


@pytest.fixture
def app(shared: httpx.AsyncClient) -> Application:
    """The application over fake sessions that all tests of a module share, and that has forgotten everything."""
    made = app_of(shared)
    for name in made.state.catalog.models:
        made.state.catalog.session(name).reset()
    return made


@pytest.fixture
def http(shared: httpx.AsyncClient, app: Application) -> httpx.AsyncClient:
    """A client of `app`."""
    return shared


@pytest.fixture(scope="module")
def served(where: str) -> Iterator[tuple[str, FakeGenerator]]:
    """Its base URL, and the one decoder it has, called wordy."""
    model = FakeGenerator("wordy")
    with serve_in_thread(generator_app(model, stream_heartbeat_s=0.05)) as url:
        yield f"{url}/v1", model


@pytest.fixture
def official(served: tuple[str, FakeGenerator]) -> Iterator[openai.OpenAI]:
    """The client; the decoder has forgotten everything."""
    served[1].engine.forget()
    with openai.OpenAI(base_url=served[0], api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture(scope="session")
def client(live_service: LiveService) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the real thing."""
    with openai.OpenAI(base_url=f"{live_service.url}/v1", api_key="not needed", max_retries=0) as client:
        yield client
