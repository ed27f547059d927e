"""Text from a decoder's constant-size state. No HTTP and no Ray here.

Read in this order: `request.py` (a request and the parts of its answer), `session.py` (one call of the step graph), `slots.py` (the
memory of many sequences), `gpu/` (both on a GPU), `sampling/` (logits to tokens), `text.py` (tokens to text that may leave), `run.py` (one
run, seen by its caller), `snapshot.py` (a run and its state as values), `keeper.py` (states to and from the store), `submission.py` and
`admission.py` (the queue), `step_engine.py` (the life of an engine, which `service/seq2seq/` shares), `sequence.py` (one run, seen by the
engine), `prefix_cache.py` (states after earlier prompts), `prefill.py` with `price.py`, and `running.py` (the runs that are fed and that
draw), `engine.py` (the step loop over these), `selftest.py`, `chat/` (conversations to prompts) and `model.py` (a served model), `runs.py`
(the runs of one request) and `reopening.py` (their continuation in another process).
"""
