"""Open Inference Protocol: `routes.py`, its `schemas.py`, and `tensors.py`."""
