"""The HTTP forms that clients know. All of them translate to a model of the catalog and back; none of them computes.

`openai/`, `tei/`, `oip/`, `cohere.py`, `jina.py` and `tgi.py` are forms of other projects; `attention.py`, `health.py` and `pages.py` are
our own; `routers.py` lists them. They share `accepted.py` and `fields_page.py` (fields without a use), `ranking.py`, and for text
`generation.py`, `generation_schemas.py` and `answer_size.py`.
"""
