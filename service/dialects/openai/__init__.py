"""The routes of OpenAI, and vLLM's additional routes.

Read in this order: `embeddings.py`, `completions.py` with `completion_schemas.py` and `completion_logprobs.py`, `writings.py` (of
encoder-decoders), `chat.py` with `tool_calls.py`, `streams.py` (continues the streams of both), `responses/`, `images.py` with `png.py`,
`tokens.py`, `usage.py`. The routes that stream text share `chunks.py` and `token_json.py`.
"""
