"""How the service behaves under a stated load. It is known here by its command and by HTTP alone."""
