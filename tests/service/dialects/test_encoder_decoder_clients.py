"""OpenAI's client, unchanged, against the real service: an encoder-decoder beside the other models, on one port."""

import openai
import pytest
import torch

from models.encoder_decoder.search import attended, beam
from models.folders.byte_tokenizer import byte_tokenizer
from tests.encoder_decoders import random_encoder_decoder

pytestmark = pytest.mark.live

MODEL, PROMPT = "tiny-writer", "forty-two"


def test_greedy_beam_stream_attention_and_a_refusal(client: openai.OpenAI) -> None:
    expect_what_torch_writes(client)


def expect_what_torch_writes(client: openai.OpenAI) -> None:
    tokenizer, model = byte_tokenizer(), random_encoder_decoder()
    source = torch.tensor([tokenizer.encode(PROMPT).ids])
    mask = torch.ones_like(source, dtype=torch.bool)
    tokens, weights = attended(model, source, mask)
    best = beam(model, source, mask, width=4)

    whole = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"attention": True})
    choice = whole.choices[0]
    assert choice.text == tokenizer.decode(tokens[0].tolist())
    assert choice.model_extra is not None
    torch.testing.assert_close(torch.tensor(choice.model_extra["attention"]["weights"]), weights[0], atol=1e-3, rtol=0)

    pieces = list(client.completions.create(model=MODEL, prompt=PROMPT, stream=True, extra_body={"attention": True}))
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text
    assert pieces[-1].choices[0].model_extra == choice.model_extra

    several = client.completions.create(model=MODEL, prompt=PROMPT, n=2, extra_body={"num_beams": 4})
    assert several.choices[0].text == tokenizer.decode(best.tokens[0].tolist())
    default = client.completions.create(model=MODEL, prompt=PROMPT, temperature=1)  # the API's own, which typed clients send
    assert default.choices[0].text == choice.text
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=0.5)
    assert refused.value.param == "temperature"
