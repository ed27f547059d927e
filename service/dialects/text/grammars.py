"""The grammars that constrain generated texts, from the fields of several APIs."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from service.dialects.text.schemas import SamplingFields
from service.errors import InvalidRequest
from service.generation.request import Grammar

_ANY_OBJECT = Grammar(kind="json_schema", source='{"type":"object"}')


def grammar_of(body: SamplingFields, format_: Grammar | None = None, format_field: str = "", call: Grammar | None = None) -> Grammar | None:
    """Return the grammar that constrains the text, or None. Raises InvalidRequest if the body has two grammars.

    `format_`: the grammar of the body's response format, which is in the field `format_field`. `call`: the grammar of a required tool
    call; it replaces `format_`."""
    found = [replace(call, param="tool_choice")] if call else [replace(format_, param=format_field)] if format_ else []
    found += _constraints(body.guided_json, body.guided_regex, body.guided_grammar, body.guided_choice, "guided_{}")
    if (outputs := body.structured_outputs) is not None:
        given = _constraints(outputs.json_, outputs.regex, outputs.grammar, outputs.choice, "structured_outputs.{}")
        given += [replace(_ANY_OBJECT, param="structured_outputs.json_object")] if outputs.json_object else []
        if len(given) > 1:
            raise InvalidRequest(
                "structured_outputs takes only one of json, regex, grammar, choice, json_object", param="structured_outputs"
            )
        found += given
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(f"{first} and {second} cannot be combined: a completion has one constraint", param=second)
    return found[0] if found else None


def _constraints(
    schema: str | dict[str, Any] | None, regex: str | None, grammar: str | None, choice: Sequence[str] | None, field: str
) -> list[Grammar]:
    """Return a grammar for each given constraint. `field` is the pattern of the fields' names, such as "guided_{}", for errors."""
    found = [] if schema is None else [json_schema(schema, field.format("json"))]
    found += [Grammar(kind="regex", source=regex, param=field.format("regex"))] if regex else []
    found += [Grammar(kind="lark", source=grammar, param=field.format("grammar"))] if grammar else []
    found += [Grammar(kind="regex", source="|".join(map(re.escape, choice)), param=field.format("choice"))] if choice else []
    return found


def json_schema(schema: str | dict[str, Any], param: str) -> Grammar:
    """Return the grammar of a JSON schema. Only its size, nesting and JSON syntax are checked here; compiling it checks the rest."""
    source = schema if isinstance(schema, str) else json.dumps(schema)
    if len(source) > 65_536:
        raise InvalidRequest(f"{param} has {len(source)} characters and the most is 65536", param=param)
    try:
        parsed = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(f"{param} is not a JSON schema: it must be an object or a boolean", param=param)
    return Grammar(kind="json_schema", source=source, param=param)


def value_grammar(type_: str, value: str | dict[str, Any], param: str) -> Grammar:
    """Return the grammar in text-generation-inference's form: a type, and a JSON schema or regular expression as its value."""
    if type_ == "regex":
        if not isinstance(value, str):
            raise InvalidRequest(f"{param}.value of a regex must be a string", param=param)
        return Grammar(kind="regex", source=value, param=param)
    if type_ == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict):
        value = value["schema"]  # the value is an object with a name and the schema
    return json_schema(value, param)


def format_grammar(type_: str, schema: dict[str, Any] | None, param: str) -> Grammar | None:
    """Return the grammar of a response format, or None if the format is plain text."""
    if type_ == "json_schema":
        if schema is None:
            raise InvalidRequest(f"{param} of type json_schema needs a schema", param=param)
        return json_schema(schema, param)
    if schema is not None:
        raise InvalidRequest(f"{param} of type {type_} takes no schema", param=param)
    return _ANY_OBJECT if type_ == "json_object" else None
