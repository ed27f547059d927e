"""The Open Inference Protocol: `routes.py`, its `schemas.py`, and `tensors.py`, which converts tensors to inputs and back."""
