"""The application under Ray Serve; this package and `cli` are all of the service that knows Ray.

`running.py` a private Ray on this machine with the `flags.py` it needs, `front.py` the port, and HAProxy by `haproxy.py`, `watch.py` the
processes; `replica.py` one process with the models, `lifeline.py` its socket, `ports.py` free ports, `ray_private.py` what Ray does not
document. `single.py` one deployment that is ingress and model; `split.py` gateways before pools of replicas, with `gpus.py` and
`ray_metrics.py`; `ingress.py` what both have in common, `scaling.py` how many replicas a pool needs, `config.py` the same application for a
cluster. `fetching.py` downloads bundles; `commands.py` has the commands `fetch` and `key`.
"""
