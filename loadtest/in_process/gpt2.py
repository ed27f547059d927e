"""Measures transformers' `generate` with a GPT-2 of random weights."""

import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from loadtest.in_process.engine import PROMPT_TOKENS
from models.decoder.model import DecoderConfig


class Gpt2:
    """A GPT-2 with the width, depth and number of feed-forward weights of the decoder `like`."""

    def __init__(self, like: DecoderConfig, new_tokens: int) -> None:
        config = GPT2Config(
            vocab_size=like.vocab_size,
            n_positions=PROMPT_TOKENS + new_tokens,
            n_embd=like.d_model,
            n_layer=like.n_layers,
            n_head=like.n_heads,
            n_inner=like.d_feedforward * (3 if like.gated else 2) // 2,
            bos_token_id=None,
            eos_token_id=None,  # without an end token, no text ends early
        )
        self.model = GPT2LMHeadModel(config).eval()  # type: ignore[no-untyped-call]
        self.parameters = self.model.num_parameters()
        self.new_tokens = new_tokens

    def tokens_per_s(self, rows: int, threads: int) -> float:
        """Return the tokens per second of `rows` texts together, generated as one batch at temperature 1 with a KV cache. The time counts
        from the prompts to the last token. As many texts are generated before, which do not count."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            self._generate(rows, self.new_tokens)
            started = time.perf_counter()
            self._generate(rows, self.new_tokens)
            return rows * self.new_tokens / (time.perf_counter() - started)
        finally:
            torch.set_num_threads(before)

    def _generate(self, rows: int, new_tokens: int) -> None:
        prompts = torch.randint(self.model.config.vocab_size, (rows, PROMPT_TOKENS))
        made = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=new_tokens,
            use_cache=True,
            pad_token_id=0,
        )
        assert made.shape == (rows, PROMPT_TOKENS + new_tokens)
