"""A list of modules that share a type."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class Modules(nn.ModuleList, Generic[Module]):
    """An `nn.ModuleList` that tells type checkers the type of its members. At runtime it is an ordinary `nn.ModuleList`."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Module]: ...
