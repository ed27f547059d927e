"""Engines in other processes: what a gateway asks of a pool of replicas, and how a replica answers. No Ray here, and no HTTP.

`wire` what crosses, `client` the engines that a gateway's models stand before, `host` the replica's end. `service/deployment/split.py` puts
Ray between the two.
"""
