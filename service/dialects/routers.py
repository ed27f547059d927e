"""Lists the routers of all dialects."""

from service.dialects import attention, cohere, contextual, development, health, jina, next_plaid, pages, pooling, scores, tgi
from service.dialects.oip import routes as oip
from service.dialects.openai import chat, completions, conversations, images, models, streams, tokens, usage
from service.dialects.openai import embeddings as openai
from service.dialects.openai.responses import routes as responses
from service.dialects.states import blobs, making
from service.dialects.states import routes as states
from service.dialects.tei import routes as tei
from service.dialects.tei import tokens as tei_tokens
from service.http.dialect import Dialect

# Routes are matched in this order, so the most frequently called ones are first.
MODULES = (
    *(openai, chat, completions, responses, conversations, streams, images, states, making, blobs, tei, tei_tokens, tgi),
    *(cohere, contextual, jina, pooling, scores, next_plaid, oip, models, tokens, attention, development, usage),
)
ROUTERS = tuple(module.router for module in (*MODULES, pages, health))
DIALECTS: tuple[Dialect, ...] = tuple(module.DIALECT for module in (openai, tei, tgi, cohere, jina, next_plaid, oip))
