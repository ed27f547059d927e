"""The clients, as Locust users: one class is one kind of client. For `locust` itself, `locustfile.py` is the file to name.

`client` is what all have in common (open and closed loop, one sample a request), `embeddings`, `rerank`, `streams` and `hostile` are the
kinds, `wire` and `crowd` connections that only hang, `recorder` where samples go. Only Locust's processes import this package.
"""
