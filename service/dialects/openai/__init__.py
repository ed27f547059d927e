"""The routes of OpenAI, and vLLM's additional routes.

Read in this order: `embeddings.py`, `completions.py`, `chat.py` with `tool_calls.py` and `written_calls.py`, `streams.py` (continues
interrupted streams of completions and chat), `responses/`, `conversations.py`, `images.py`, `tokens.py`, `models.py`,
`usage.py`. The routes for text share `../text/`.
"""
