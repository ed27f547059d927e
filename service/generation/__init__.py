"""Text from a decoder's constant-size state. No HTTP and no Ray here.

Read in this order: `request.py` (what is asked for and what comes back), `session.py` (one call of the step graph), `slots.py` (the
memory of many sequences), `device.py` and `copying.py` (both on a GPU), `sampling.py` with `drawing.py` and `random.py` (logits to
tokens), `prompt_logprobs.py`, `text.py` (tokens to text that may leave), `grammar.py` (what a token may be) and `masks.py` (on which
threads), `run.py` and `sequence.py` (one run, seen by its caller and by the engine), `condition.py` (a run as a value), `admission.py`,
`prefill.py` with `price.py`, and `running.py` (the runs that wait, are fed, draw), `engine.py` (the step loop over these three),
`selftest.py` and `model.py` (a served decoder).
"""
