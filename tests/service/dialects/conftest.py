"""Every dialect before an engine of its own process and before a pool; and OpenAI's own client, with the server it talks to."""

from collections.abc import Iterator

import openai
import pytest

from tests.service import fakes
from tests.service.fakes import PATIENCE_S, serve_in_thread
from tests.service.generation_fakes import FakeGenerator, generator_app


@pytest.fixture(scope="module", params=["here", pytest.param("pool", marks=pytest.mark.pool)], autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the engines of all applications are that tests of this module make."""
    fakes.pooled = request.param == "pool"
    yield request.param
    fakes.pooled = False


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
