"""A gateway's catalog: the same models, before engines that are pools of replicas."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from export import contract
from service.catalog import Catalog, Model, Opened, Served
from service.generation.model import Generating, GeneratorModel
from service.pools.client import PoolEncoder, PoolGenerator, ask_attention, limits_of, row_bytes, selftest_of
from service.pools.replicas import Pool, Replicas
from service.runtime.onnx import Array
from service.seq2seq.model import WritingModel
from service.settings import Settings
from service.telemetry.metrics import Metrics

# How long replicas of a gateway's own bundles may take to come up, as a rolling update brings them; and between two looks.
_EXCHANGE_S, _AGAIN_S = 600.0, 0.5


class GatewayCatalog(Catalog):
    """Tokenizers, templates and manifests are here, sessions are not. Each pool serves every model of its kind."""

    def __init__(self, settings: Settings, *, encoders: Pool | None, generators: Pool | None, metrics: Metrics | None = None) -> None:
        """A pool may be left out where there is no bundle of its kind."""
        super().__init__(settings, metrics)
        pools: dict[contract.Pool, Pool | None] = {"encoder": encoders, "generator": generators}
        self._replicas = {name: Replicas(pool) for name, pool in pools.items() if pool is not None}
        self._pools = list(self._replicas.values())

    async def connect(self) -> None:
        """Wait until every pool has a replica that answers and serves the gateway's own bundles: while these are exchanged, gateways and
        replicas are replaced side by side, and the first that answers may be an older one. BundleError when that takes too long."""
        await asyncio.gather(*(pool.connect() for pool in self._pools))
        deadline = time.monotonic() + _EXCHANGE_S
        while (missing := await asyncio.to_thread(self._missing)) and time.monotonic() < deadline:
            self.failure = missing  # of no lasting kind: it says why this gateway is not ready yet
            await asyncio.sleep(_AGAIN_S)
            for pool in self._pools:
                await pool.describe()
        if missing:
            raise contract.BundleError(missing)
        self.failure = None

    def _missing(self) -> str | None:
        """What the replicas that have answered do not serve, in a sentence."""
        served = {name: model for pool in self._pools for name, model in pool.described.items()}
        for bundle in self.settings.bundles:
            manifest = contract.read_manifest(bundle)
            fingerprint = served.get(manifest.name, {}).get("fingerprint")
            if fingerprint != manifest.fingerprint:
                return (
                    f"{bundle}: the gateway has {manifest.name} with fingerprint {manifest.fingerprint[:12]}, "
                    f"its replicas {str(fingerprint)[:12]}: give every node the same bundles"
                )
        return None

    async def stop(self) -> None:
        for pool in self._pools:
            await pool.stop()
        await super().stop()

    def open_encoder(self, model: Model) -> Opened:
        pool = self._replicas["encoder"]
        described = pool.described[model.name]
        engine = PoolEncoder(pool, model.name, model.manifest.fingerprint, limits_of(described), row_bytes(model.manifest))
        return Opened(engine, described["provider"], selftest_of(described))

    def open_generator(self, model: GeneratorModel | WritingModel) -> Generating:
        return PoolGenerator(self._replicas["generator"], model.name, model.manifest.fingerprint)

    open_writer = open_generator

    def check_maps(self, bundle: Path, manifest: contract.Manifest) -> None:
        """The replicas do it, whose graphs these are."""

    async def attention(self, model: Served, ids: Sequence[int], layers: Sequence[int], deadline: float) -> list[Array]:
        return await ask_attention(
            self._replicas[model.manifest.traits.pool], (model.name, model.manifest.fingerprint), ids, layers, deadline
        )
