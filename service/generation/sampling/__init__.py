"""Samples tokens from logits: `sampler.py` for all running rows, `drawing.py` (one token for each row), `truncation.py` (top_k, top_p,
min_p, typical_p), `scratch.py` (its buffers), `random.py` (the random numbers), `grammar.py` and `masks.py` (which tokens a grammar
allows), `prompt_logprobs.py` (log-probabilities of prompts)."""
