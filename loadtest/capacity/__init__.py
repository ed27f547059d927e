"""docs/capacity.md: `campaign.py` makes the runs (`make capacity`), with a second encoder that `deep_encoder.py` exports; `tables.py`
turns them into the page, `fleet.py` computes a fleet from one of them.
"""
