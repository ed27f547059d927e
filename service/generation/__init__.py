"""Text from a decoder's constant-size state. No HTTP and no Ray here.

Read in this order: `request.py` (what is asked for and what comes back), `session.py` (one call of the step graph), `sampling.py` (logits to
tokens), `text.py` (tokens to text that may leave), `grammar.py` (what a token may be), `engine.py` (slots, the step loop, fairness).
"""
