"""Converts conversations to prompts. `template.py` renders a checkpoint's template in a separate process (`template_child.py`), and
`prompt.py` encodes the rendered prompt so that special tokens come only from the template. `continuation.py` renders the messages that
continue a stored state, and `call_opening.py` the beginning of a required tool call.
"""
