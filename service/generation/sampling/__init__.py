"""Samples tokens from logits: `sampler.py` for all running rows, `drawing.py` (one token for each row), `random.py` (the random
numbers), `grammar.py` and `masks.py` (which tokens a grammar allows), `prompt_logprobs.py` (log-probabilities of prompts)."""
