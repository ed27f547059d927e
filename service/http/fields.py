"""Rules for the fields of every body, in every dialect.

1. A null counts as an absent field, so the field has its default. A required field cannot be null.
2. If clients of a dialect send a field that this service does not use, the body's class lists it. A field in `ignored` never changes
   an answer, so any value is accepted. Of a field in `unsupported`, those values are accepted that change nothing: the listed ones,
   where `EMPTY` stands for null, false, 0, "", [], {}, and objects of only these. Any other value is an error that names the field.
3. An unlisted field is ignored if the dialect's original server ignores it. A body of class `Fields` rejects it, unless it is
   null, "", [] or {}, because it may be a misspelt sampling parameter.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError, PydanticUseDefault

NOT_SUPPORTED, UNKNOWN = "not_supported", "extra_forbidden"


EMPTY = object()  # stands for every empty value in `Body.unsupported`
Unsupported = Mapping[str, tuple[Any, ...]]


def unsupported_fields(*names: str | Unsupported, **accepted: tuple[Any, ...]) -> Unsupported:
    """Return a value for `Body.unsupported`. `names`: fields of which only empty values are accepted, separated by spaces, or another such
    mapping. `accepted`: fields with the values that are accepted.
    """
    fields: dict[str, tuple[Any, ...]] = {}
    for each in names:
        fields |= dict.fromkeys(each.split(), (EMPTY,)) if isinstance(each, str) else each
    return fields | accepted


def is_empty(value: Any) -> bool:
    """Return whether the value is null, false, 0, "", [] or {}, or an object of only such values."""
    return all(map(is_empty, value.values())) if isinstance(value, dict) else not value


def _without_empty(value: Any) -> Any:
    """Return an object without its empty members, such as the nulls of typed clients. Other values are returned as they are."""
    return {name: inner for name, inner in value.items() if not is_empty(inner)} if isinstance(value, dict) else value


def _without_nulls(value: Any) -> Any:
    return {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else value


WITHOUT_NULLS = BeforeValidator(_without_nulls)  # removes nulls from an object with arbitrary keys


def _null_is_default(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


_NULL_IS_DEFAULT = BeforeValidator(_null_is_default)


def _schema(schema: dict[str, Any], body: type["Body"]) -> None:
    """State in the JSON schema of `body` whether additional fields are accepted."""
    if body.closed:
        schema["additionalProperties"] = False
    else:
        schema.pop("additionalProperties", None)


class Body(BaseModel):
    """Base class of every request body and of the objects in it. It applies the three rules in the module's docstring."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_schema)

    ignored: ClassVar[frozenset[str]] = frozenset()  # fields without an effect, whatever their value
    unsupported: ClassVar[Unsupported] = {}  # other fields that clients send, and the values of each that change nothing
    closed: ClassVar[bool] = False  # True if an unlisted field is an error

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Let validation replace a null by the field's default, if the default is not None (rule 1 in the module's docstring)."""
        changed = False
        for field in cls.model_fields.values():
            if not field.is_required() and (field.default is not None) and _NULL_IS_DEFAULT not in field.metadata:
                field.metadata.append(_NULL_IS_DEFAULT)
                changed = True
        if changed:
            cls.model_rebuild(force=True)

    @model_validator(mode="after")
    def _only_what_changes_nothing(self) -> Self:
        if given := self.__pydantic_extra__:
            for name, value in given.items():
                self._check(name, value)
            self.__pydantic_fields_set__.difference_update(given)
            given.clear()
        return self

    def _check(self, name: str, value: Any) -> None:
        """Raise an error if the body must not have this value in `name`, which is no field of the class.

        See rules 2 and 3 in the module's docstring.
        """
        if value is None or name in self.ignored:
            return
        if (accepted := self.unsupported.get(name)) is not None:
            if not _takes(accepted, value):
                raise PydanticCustomError(NOT_SUPPORTED, "{reason}", {"field": name, "reason": refusal(accepted)})
        elif self.closed and not (value == "" or (isinstance(value, list | dict) and not value)):
            raise PydanticCustomError(UNKNOWN, "is not a parameter of this request", {"field": name})


def _takes(accepted: tuple[Any, ...], value: Any) -> bool:
    if EMPTY in accepted and is_empty(value):
        return True
    given = _without_empty(value)
    return any(isinstance(given, bool) == isinstance(known, bool) and given == known for known in accepted)


def refusal(accepted: tuple[Any, ...]) -> str:
    """Return the error about an unsupported field with another value than those accepted."""
    values = tuple(value for value in accepted if value is not EMPTY)
    return f"is not supported: leave it out{f' or send {_either(values)}' if values else ''}"


def schema_of(body: type[Body]) -> dict[str, Any]:
    """Return the JSON schema of a body, without `$ref`s, for routes whose signature does not contain the body's class."""
    schema = body.model_json_schema()
    inlined: dict[str, Any] = _inlined(schema, schema.get("$defs", {}))
    return inlined


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(each, definitions) for key, each in node.items() if key != "$defs"}


class Fields(Body):
    """Base class of bodies that reject unknown fields, such as those of OpenAI's text routes. So a misspelt parameter is an error."""

    model_config = ConfigDict(allow_inf_nan=False)

    closed = True


def _either(values: tuple[Any, ...]) -> str:
    *first, last = (repr(value) if isinstance(value, str) else json.dumps(value) for value in values)
    return f"{', '.join(first)} or {last}" if first else last
