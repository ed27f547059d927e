"""How a request becomes an answer: bundles in, HTTP out. Nothing here imports torch.

Read in this order: `settings` what can be set, `errors` what can go wrong, `tokenization` text -> ids, `runtime` ids -> vectors (one call),
`batching` which inputs share a call, `engine` the queue and the threads around it, `catalog` the models being served, `vectors` the forms
a vector is sent in, `dialects/` the HTTP forms, `app` all of it as one ASGI application, `deployment` the same under Ray Serve, `cli`.
"""
