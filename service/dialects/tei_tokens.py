"""`/tokenize` and `/decode` of the text-embeddings-inference dialect: texts to tokens and back, without the model."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from fastapi import APIRouter
from tokenizers import Tokenizer

from service.catalog import Catalog
from service.dialects.tei_schemas import TeiDecodeRequest, TeiTokenizeRequest
from service.errors import EmptyInput, NeverFits
from service.routing import CatalogDep, JsonRoute

Result = TypeVar("Result")
router = APIRouter(route_class=JsonRoute)


async def tokenize(body: TeiTokenizeRequest, catalog: Catalog) -> list[list[dict[str, Any]]]:
    """The tokens of each text after its prompt, never cut. Its path is `tokens.tokenize`'s, which another dialect has too."""
    model = catalog.get(body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    model.check_size(len(texts))
    if (characters := sum(map(len, texts))) > (limit := catalog.settings.max_input_characters):
        raise NeverFits(f"the texts have {characters} characters and the most is {limit}: send them in parts")
    if not all(texts):
        raise EmptyInput("`inputs` cannot be empty", param="inputs")
    prompt = model.texts.prompt(body.prompt_name)
    tokenizer = model.texts.tokenizer
    return await aside(catalog, lambda: [tokens_of(tokenizer, prompt + text, body.add_special_tokens) for text in texts])


@router.post("/decode", response_model=list[str])
async def decode(body: TeiDecodeRequest, catalog: CatalogDep) -> Any:
    """The text of each list of token ids; ids that are not in the vocabulary give nothing."""
    model = catalog.get(body.model)
    lists: list[Any] = [ids for ids in body.ids if isinstance(ids, list)] or [body.ids]
    if not all(lists):
        raise EmptyInput("`input_ids` cannot be empty", param="ids")
    model.check_size(len(lists))
    if (size := sum(map(len, lists))) > (limit := catalog.settings.max_input_characters):
        raise NeverFits(f"there are {size} token ids and the most is {limit}: send them in parts")
    tokenizer = model.texts.tokenizer
    return await aside(catalog, lambda: [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists])


def tokens_of(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[dict[str, Any]]:
    """The tokens with their place in the UTF-8 of `text`; the tokenizer counts in characters."""
    encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    at: Sequence[int] = range(len(text) + 1) if text.isascii() else [0, *accumulate(len(letter.encode()) for letter in text)]
    return [
        {"id": id_, "text": token, "special": True, "start": None, "stop": None}
        if special
        else {"id": id_, "text": text[start:stop], "special": False, "start": at[start], "stop": at[stop]}
        for id_, token, special, (start, stop) in zip(
            encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True
        )
    ]


async def aside(catalog: Catalog, work: Callable[[], Result]) -> Result:
    """The work on a tokenizer thread: nobody measures these routes, and a long text must not stop the event loop."""
    return await asyncio.get_running_loop().run_in_executor(catalog.tokenizers, work)
