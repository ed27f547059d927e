"""OpenAI's routes, and vLLM's beside them.

Read in this order: `embeddings.py`, `completions.py` with `completion_schemas.py` and `completion_logprobs.py`, `writings.py` (of
encoder-decoders), `chat.py` with `tool_calls.py`, `responses.py`, `images.py` with `png.py`, `tokens.py`, `usage.py`; `chunks.py` and
`token_json.py` are shared by those that stream text.
"""
