"""What every other package shares: `errors.py` (the base class of all errors)."""
