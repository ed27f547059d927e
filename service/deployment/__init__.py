"""The application under Ray Serve; this package and `cli` are all of the service that knows Ray.

`running` a private Ray on this machine; `single` one deployment that is ingress and model; `split` gateways before pools of replicas;
`ingress` what both have in common, `scaling` how many replicas a pool needs, `config` the same application for a cluster.
"""
