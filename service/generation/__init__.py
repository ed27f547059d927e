"""Generates text with decoders whose state has a constant size. No file here imports HTTP libraries or Ray.

Read in this order: `request.py` (a request and the parts of its answer), `session.py` (one call of the step graph), `slots.py` (the
memory of many sequences), `gpu/` (both on a GPU), `sampling/` (logits to tokens), `text.py` (tokens to text that can be sent), `run.py`
(one run, for its caller), `snapshot.py` (a run and its state as values), `saved/` (states that outlive their run), `submission.py` and
`admission.py` (the queue), `step_engine.py` (queue, slots and delivery, shared with `service/seq2seq/`), `sequence.py` (one run, inside the
engine), `intake.py` (requests to sequences), `prefill.py`, `running.py` (the runs that are generating), `places.py` (which of both has a
run), `engine.py` (the step loop), `selftest.py`, `chat/` (conversations to prompts), `model.py` (a served model), `runs.py` (the runs of
one request), `reopening.py` (the runs of one request in another process).
"""
