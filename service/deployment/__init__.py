"""Runs the application under Ray Serve. In `service/`, only this package uses Ray.

One machine: `running.py` starts and stops everything, `deployer.py` calls Ray for it with the settings in `flags.py`, `front.py` holds the
port, `haproxy.py` configures HAProxy, `watch.py` watches the processes, `replica.py` is a process with models, `lifeline.py` is the
replica's socket to the command, and `ray_private.py` contains all uses of Ray's undocumented parts. Profiles: `single.py` has one
deployment, which accepts requests and computes them; `split.py` has gateways in front of pools of replicas, with `ray_metrics.py`. Both use
`ingress.py`. `scaling.py` computes the number of replicas and their GPUs, `config.py` writes Serve's configuration for a cluster.
`fetching.py` downloads bundles, `upgrading.py` replaces the Ray cluster of a RayService; `commands.py` has the commands `fetch`, `key` and
`upgrade`.
"""
