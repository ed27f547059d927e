"""What the service says of itself: `metrics.py` with `histogram.py`, `tracing.py`, `logs.py`, and `usage.py`, the account of one run."""
