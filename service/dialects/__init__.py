"""The HTTP APIs of the service, called dialects. Each dialect converts HTTP requests to requests to a model, and the model's results to
HTTP answers.

`openai/`, `tei/`, `oip/`, `cohere.py`, `contextual.py`, `jina.py`, `next_plaid.py`, `pooling.py`, `scores.py` and `tgi.py` are APIs of
other projects. `states/`, `attention.py`, `health.py`, `pages.py` (the console and the OpenAPI document) and `development.py` are this
project's own. `routers.py` lists the routers of all dialects. The dialects share `ranking.py`, `given_vectors.py` (vectors in place of
texts), `input_types.py` (queries and documents), `search_outputs.py` (what an encoder gives in one call), `arrow.py` (as a table),
`chunks.py`, and for generated text `text/`.
"""
