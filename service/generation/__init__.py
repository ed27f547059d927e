"""Generates text with decoders whose state has a constant size. No file here imports HTTP libraries or Ray.

Read in this order: `request.py` (a request and the parts of its answer), `session.py` (one call of the step graph), `slots.py` (memory for
the states of many sequences), `gpu/` (calls and states on a GPU), `sampling/` (draws tokens from logits), `text.py` (decodes tokens to text
that can be sent), `run.py` (one run, as its caller sees it), `state.py` (a decoder's state as a value), `saved/` (states that outlive their
run), `submission.py` and `admission.py` (the queue), `step_engine.py` (the loop over a queue and a workload, also of encoder-decoders),
`sequence.py` (one run, as the engine sees it), `intake.py` (the prompts that wait to be fed), `prefill.py` (feeds prompts), `running.py`
(the runs that are generating), `decoding.py` (what a turn computes), `engine.py` (the engine of decoders), `selftest.py` (tests a
bundle before it is served), `chat/` (makes prompts from conversations), `model.py` (a served model), `runs.py` (the runs of one request),
`reopening.py` (opens lost runs again in another process)."""
