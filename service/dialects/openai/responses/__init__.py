"""The routes `/v1/responses` of OpenAI. Responses can be stored, read again and continued.

With `store` a response is a document in the state store. It is written before the first token, and again when the response has ended.
Between these two writes one process owns the response: its lease is that of `service/streams/lease.py`. So a process that was paused while
another process took over cannot write.

Read in this order: `schemas.py` (bodies and answers), `items.py` (the input as messages, and as a list), `answer.py` (a response's text,
token by token, and its JSON), `events.py` (the events of a stream and their numbers), `preparing.py` (converts a body to a request to the
engine), `conversations.py` (conversations in the store), `stored.py` (responses in the store), `live.py` (one response while this process
generates it), `running.py` (all responses that this process generates, including those taken over from other processes),
`stream_source.py` (the source of a stream), `routes.py`. The routes of conversations are in `../conversations.py`.
"""
