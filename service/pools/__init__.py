"""Engines in other processes: what a gateway asks of a pool of replicas, and how a replica answers. No Ray here, and no HTTP.

`wire` what crosses and `limits` how large it may be, `replicas` which replica is asked and whether it answers, `client` the engines that a
gateway's models have, `host` the replica's end. `service/deployment/split.py` puts
Ray between the two.
"""
