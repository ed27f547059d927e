"""How the service behaves under a stated load."""
