"""Measures the figures of docs/capacity.md: `campaign.py` runs all load tests (`make capacity`), some of them with a second encoder that
`deep_encoder.py` exports. `tables.py` writes their results into the page. `fleet.py` computes how many replicas a fleet needs, from the
figures of one replica.
"""
