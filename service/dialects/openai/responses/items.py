"""Converts the input of a response to messages for the chat template, and to the items that clients can list."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Query

from service.dialects.openai.responses.schemas import CallItem, CallOutputItem, Include, InputItem, InputPart, ResponseRequest
from service.dialects.openai.tool_calls import arguments_of
from service.dialects.states.records import list_json
from service.errors import InvalidRequest
from service.http.routing import on_loop

Item = InputItem | CallItem | CallOutputItem


def messages_of(body: ResponseRequest) -> list[dict[str, Any]]:
    """Return the instructions and the input as messages for the chat template."""
    first = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    return [*first, *map(_message, body.input)]


def _message(item: Item) -> dict[str, Any]:
    if isinstance(item, CallItem):
        called = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments_of(item.arguments)}}
        return {"role": "assistant", "content": "", "tool_calls": [called]}
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    return {"role": item.role, "content": _text(item.content)}


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def listed(body: ResponseRequest, response: str) -> list[dict[str, Any]]:
    """Return the input as items with ids. An item's id depends only on the response's id and on the item's index in the input."""
    items: list[Item] = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else list(body.input)
    return [listed_item(item, f"{response.removeprefix('resp_')}_{at}") for at, item in enumerate(items)]


def listed_item(item: Item, place: str) -> dict[str, Any]:
    """Return the JSON of an item, as clients can list it. Its id is a prefix that depends on the item's type, followed by `place`."""
    if isinstance(item, CallItem):
        said = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return {"id": f"fc_{place}", "type": "function_call", "status": "completed", **said}
    if isinstance(item, CallOutputItem):
        given = {"call_id": item.call_id, "output": _text(item.output)}
        return {"id": f"fco_{place}", "type": "function_call_output", "status": "completed", **given}
    texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
    if item.role == "assistant":
        content: list[dict[str, Any]] = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    else:
        content = [{"type": "input_text", "text": text} for text in texts]
    return {"id": f"msg_{place}", "type": "message", "status": "completed", "role": item.role, "content": content}


class Page(NamedTuple):
    """The query of a route that lists items: which of them to return."""

    limit: Annotated[int, Query(ge=1, le=100, description="Most items of a page.")] = 20
    order: Annotated[Literal["asc", "desc"], Query(description="desc: the last item first.")] = "desc"
    after: Annotated[str | None, Query(description="The `last_id` of the page before.")] = None
    include: Annotated[Sequence[Include], Query(alias="include[]", description="Accepted and ignored.")] = []

    def of(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the page of `items`. Raises InvalidRequest if there is no item with the id `after`."""
        items = items if self.order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if self.after is not None and self.after not in ids:
            raise InvalidRequest(f"there is no item {self.after[:100]!r}: begin with the first page", param="after")
        begin = 0 if self.after is None else ids.index(self.after) + 1
        return list_json(items[begin : begin + self.limit], has_more=begin + self.limit < len(items))


PageDep = Annotated[Page, on_loop(Page)]
