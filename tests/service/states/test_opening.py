"""The store that the settings name."""

import pytest

from service.settings import SettingsError
from service.states.opening import check_shared


def test_profile_split_refuses_a_store_in_memory() -> None:
    """Each process would have a store of its own, and a state of one generator would be missing in the other."""
    with pytest.raises(SettingsError, match="states=memory is a store of one process, and profile split has several"):
        check_shared("memory")
    check_shared("/var/lib/attnserve")
