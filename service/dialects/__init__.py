"""The HTTP APIs of the service. Each translates requests to a model of the catalog, and its answers back; none computes.

`openai/`, `tei/`, `oip/`, `cohere.py`, `jina.py` and `tgi.py` are APIs of other projects; `attention.py`, `health.py` and `pages.py` are
this project's own. `routers.py` lists them. They share `accepted.py` and `fields_page.py` (fields without an effect), `ranking.py`, and for
text `generation.py`, `generation_schemas.py` and `answer_size.py`.
"""
