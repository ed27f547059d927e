"""Lets a gateway use engines in other processes, the replicas of a pool. No Ray and no HTTP here.

Read in this order: `wire.py` and `messages.py` (the values that are sent), `limits.py` (their maximum size), `replicas.py` (which
replica is called, and whether it responds), `tries.py` (when another one is asked), `client.py` and `generators.py` (the engines of a
gateway), `catalog.py` (these models), `host.py` (the replica's side), `transport.py` (sockets between both).
`service/deployment/split.py` finds the replicas through Ray.
"""
