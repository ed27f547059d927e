"""What every other package shares: `errors.py` (the base class of all errors) and `terminal.py` (what the commands print)."""
