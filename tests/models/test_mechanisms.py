"""The table of mechanisms says what is there."""

import importlib
import inspect

import pytest

from tests.models.mechanisms import MECHANISMS


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_mechanism_is_a_documented_function_with_these_arguments(mechanism: str) -> None:
    path, arguments = MECHANISMS[mechanism]
    module, name = path.rsplit(".", 1)
    function = getattr(importlib.import_module(module), name)
    assert set(arguments) <= inspect.signature(function, follow_wrapped=True).parameters.keys()
    assert inspect.getdoc(function)
