"""Samples tokens from logits: `sampler.py` (parameters, penalties and draws of all running rows), `plan.py` (what draws do with each row),
`graph.py` (draws one token for each row), `drawing.py` (draws after truncation), `truncation.py` (top_k, top_p, min_p, typical_p),
`scratch.py` (buffers for draws), `random.py` (the random numbers), `grammar.py` and `masks.py` (which tokens a grammar allows),
`prompt_logprobs.py` (log-probabilities of prompts), `guesses.py` (guesses the tokens that come next).
"""
