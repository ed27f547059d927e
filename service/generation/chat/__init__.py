"""Conversations to prompts: `template.py` renders a checkpoint's template in a process of its own (`template_child.py`), `prompt.py`
encodes what it gives, with special tokens from the template alone."""
