"""Logits to tokens: `sampler.py` for all running rows, `drawing.py` one token of each, `random.py` its random number, `grammar.py` and
`masks.py` which tokens may be drawn, `prompt_logprobs.py`."""
