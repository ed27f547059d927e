"""The service's observability: `metrics.py`, `state_store_metrics.py`, `history.py` (the metrics of the last minute),
`tracing.py`, `logs.py`, and `usage.py` with one run's token counts."""
