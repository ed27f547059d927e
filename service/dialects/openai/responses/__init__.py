"""The routes `/v1/responses` of OpenAI, with a store.

A response is a document of the store. It is written before the first token, and again when the response has ended. Meanwhile one process
owns it: every write names the version that the writer has read, so a process that was paused while another one took over writes nothing.

In reading order: `schemas.py` (bodies and answers), `items.py` (the input as messages, and as a list), `said.py` (what a response has said,
token by token), `answer.py` (a response as JSON), `events.py` (the events of a stream and their numbers), `preparing.py` (a body becomes a
request to the engine), `rows.py` (responses in the store), `live.py` (one response while it is generated here), `running.py` (all of these
of one process, and those taken over from others), `following.py` (the source of a stream), `routes.py`.
"""
