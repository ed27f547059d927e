"""The routes of OpenAI, and vLLM's additional routes.

Read in this order: `embeddings.py`, `completions.py` with `completion_schemas.py` and `completion_logprobs.py`,
`encoder_decoder_completions.py` (completions by encoder-decoders), `chat.py` with `chat_schemas.py`, `tool_calls.py` and
`written_calls.py`, `streams.py` (continues interrupted streams of completions and chat), `responses/`, `conversations.py`, `images.py` with
`png.py`, `tokens.py`, `models.py`, `usage.py`. The routes that stream text share `chunks.py` and `token_json.py`."""
