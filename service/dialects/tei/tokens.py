"""The routes `/tokenize` and `/decode` of the text-embeddings-inference dialect. They use only the tokenizer of a model."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter
from tokenizers import Encoding, Tokenizer

from service.call import Call
from service.catalog import Catalog
from service.dialects.tei.schemas import ERRORS, TeiDecodeRequest, TeiTokenizeRequest
from service.errors import EmptyInput, NeverFits
from service.http.routing import CallDep, CatalogDep, JsonRoute
from service.tokenization.tokenizer_file import bytes_of, texts_of

_TOKEN_BYTES = 70  # size of a token's JSON object without its text
router = APIRouter(route_class=JsonRoute, tags=["text-embeddings-inference"], responses=ERRORS)


async def tokenize(body: TeiTokenizeRequest, call: Call, catalog: Catalog) -> Any:
    """Return the tokens of each text with its prompt in front, without truncation.

    The route `/tokenize` is in `openai/tokens.py`, because two dialects share it.
    """
    model = catalog.get(body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    model.check_size(len(texts))
    if (characters := sum(map(len, texts))) > (limit := catalog.settings.max_input_characters):
        raise NeverFits(f"the texts have {characters} characters and the most is {limit}: send them in parts")
    if not all(texts):
        raise EmptyInput("`inputs` cannot be empty", param="inputs")
    prompt = model.texts.prompt(body.prompt_name)
    tokenizer = model.texts.tokenizer
    texts = [prompt + text for text in texts]
    # Unlike `encode`, `encode_batch` releases the GIL.
    encode = partial(tokenizer.encode_batch, texts, add_special_tokens=body.add_special_tokens)
    encodings = await catalog.tokenizers.run(encode, size=characters, client=call.client)
    tokens = sum(map(len, encodings))
    catalog.expect(call, tokens * _TOKEN_BYTES + 2 * characters, f"{tokens} tokens of {_TOKEN_BYTES} bytes")
    found = [tokens_of(tokenizer, encoding, text) for encoding, text in zip(encodings, texts, strict=True)]
    return found if call.answer_bytes else [list(each) for each in found]


@router.post("/decode", response_model=list[str])
async def decode(body: TeiDecodeRequest, call: CallDep, catalog: CatalogDep) -> Any:
    """Return the text of each list of token ids. Ids outside the vocabulary are skipped."""
    model = catalog.get(body.model)
    lists: list[Any] = [ids for ids in body.ids if isinstance(ids, list)] or [body.ids]
    if not all(lists):
        raise EmptyInput("`input_ids` cannot be empty", param="ids")
    model.check_size(len(lists))
    if (size := sum(map(len, lists))) > (limit := catalog.settings.max_input_characters):
        raise NeverFits(f"there are {size} token ids and the most is {limit}: send them in parts")
    tokenizer = model.texts.tokenizer
    most = await catalog.tokenizers.run(partial(bytes_of, tokenizer, lists), size=size, client=call.client)
    catalog.expect(call, most, f"the text of {size} tokens")
    decoding = partial(texts_of, tokenizer, lists, skip_special_tokens=body.skip_special_tokens)
    return await catalog.tokenizers.run(decoding, size=size, client=call.client)


def tokens_of(tokenizer: Tokenizer, encoding: Encoding, text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of the tokens, with their offsets in `text` in UTF-8 bytes. The tokenizer's own offsets are in characters."""
    at: Sequence[int] = range(len(text) + 1) if text.isascii() else _places(text)
    for index, (id_, special) in enumerate(zip(encoding.ids, encoding.special_tokens_mask, strict=True)):
        # One token per call: reading the offsets of a million tokens in one call would hold the GIL for a third of a second.
        start, stop = (None if special else encoding.token_to_chars(index)) or (0, 0)
        if special:
            yield {"id": id_, "text": tokenizer.id_to_token(id_), "special": True, "start": None, "stop": None}
        else:
            yield {"id": id_, "text": text[start:stop], "special": False, "start": int(at[start]), "stop": int(at[stop])}


def _places(text: str) -> Any:
    """Return the offset of each character of `text` in UTF-8 bytes, followed by the length of the text in bytes."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate([[0], np.cumsum(sizes)])
