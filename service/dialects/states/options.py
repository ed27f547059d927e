"""The fields of a request that continues a state or stores a new state."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt
from pydantic_core import PydanticCustomError

from service.http.fields import WITHOUT_NULLS, Fields

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@~-]{0,127}$"
MOST_PAIRS = 16  # limit on the metadata pairs of a state
MOST_TTL_S = 3_153_600_000  # a hundred years in seconds
STATE_REFERENCE = "Id or name of a state."


def _no_id(name: str) -> str:
    if name.startswith("state_"):
        raise PydanticCustomError("name", "a name cannot begin with state_, as ids do")
    return name


StateName = Annotated[str, Field(pattern=NAME_PATTERN), AfterValidator(_no_id)]


def _seconds_or_never(value: Any) -> Any:
    if value is None or value == "never" or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise PydanticCustomError("ttl", f"Input should be a number of seconds from 1 to {MOST_TTL_S}, or 'never'")


Ttl = Annotated[Annotated[StrictFloat, Field(ge=1, le=MOST_TTL_S)] | Literal["never"], BeforeValidator(_seconds_or_never)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MOST_PAIRS), WITHOUT_NULLS
]
Exactness = Literal["strict", "best_effort"]
EXACTNESS = "strict refuses a state of a machine whose arithmetic may give other bits; best_effort continues it, and says so."


class KeepFields(Fields):
    """The options for storing a state."""

    name: StateName | None = Field(None, description="A name that points to the state from now on. It may point to another one now.")
    ttl_s: Ttl | None = Field(None, description="Seconds after which the state expires. Default: the service's `state_ttl_s`.")
    pin: StrictBool = Field(False, description="A pinned state is never evicted to make room for others.")
    metadata: Metadata = Field({}, description="Up to 16 pairs of texts.")


class StoreState(KeepFields):
    name_version: StrictInt | None = Field(
        None, ge=0, lt=2**53, description="The version that the name must have now; 0: it must be new. Otherwise the answer is 412."
    )


class StateFields(Fields):
    """The fields about states that every request for text has."""

    state: str | None = Field(None, min_length=1, max_length=256, description=f"{STATE_REFERENCE} The prompt is what comes after it.")
    store_state: StrictBool | StoreState = Field(
        False, description="Keep the state after the last token, and answer with its id. An object says how to keep it."
    )
    exact: Exactness = Field("strict", description=EXACTNESS)
