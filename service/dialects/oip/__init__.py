"""The dialect of the Open Inference Protocol: `routes.py`, `schemas.py`, and `tensors.py`, which converts tensors to inputs and back."""
