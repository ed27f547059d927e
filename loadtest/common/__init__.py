"""Code that several measurements share. `server.py` is the harness that starts, watches and kills programs."""
