"""A list of modules that share a type."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class Modules(nn.ModuleList, Generic[Module]):
    """`nn.ModuleList` with the type of its members, for type checkers; at runtime there is no difference."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Module]: ...
