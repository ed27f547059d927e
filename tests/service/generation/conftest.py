"""A device for decoders."""

import pytest

from service.generation import copying, device
from tests.service.generation.afar import open_afar


@pytest.fixture
def afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is to decoders of a device what a GPU is."""
    for module in (copying, device):
        monkeypatch.setattr(module, "open_graph", open_afar)
