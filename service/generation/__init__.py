"""Text from a decoder's constant-size state. No HTTP and no Ray here.

Read in this order: `request.py` (a request and the parts of its answer), `session.py` (one call of the step graph), `slots.py` (the
memory of many sequences), `device.py` and `row_copies.py` (both on a GPU), `sampling/` (logits to tokens), `text.py` (tokens to text that
may leave), `run.py` and `sequence.py` (one run, seen by its caller and by the engine), `snapshot.py` (a run and its state as values),
`admission.py`, `prefill.py` with `price.py`, and `running.py` (the runs that wait, are fed, draw), `engine_thread.py` and `engine.py` (the
step loop over these three), `selftest.py`, `chat/` (conversations to prompts) and `model.py` (a served decoder), `runs.py` (the runs of
one request).
"""
