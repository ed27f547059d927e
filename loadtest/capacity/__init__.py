"""Makes docs/capacity.md: `campaign.py` makes the runs (`make capacity`), with a second encoder that `deep_encoder.py` exports;
`tables.py` writes the page from the runs, and `fleet.py` computes the size of a fleet from the ramp of one run.
"""
