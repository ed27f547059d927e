"""A gateway's catalog: the same models as in a service of one process, but with engines that call pools of replicas."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from export import contract
from service.catalog import Catalog, Served
from service.encoding.model import Encoder, Model
from service.encoding.queue import EncoderLimits
from service.encoding.selftest import SelfTest
from service.generation.model import Generating, Generator
from service.pools.client import PoolEncoder, ask_attention, row_bytes
from service.pools.generators import PoolGenerator
from service.pools.replicas import Pool, Replicas
from service.runtime.onnx import Array
from service.settings import Settings
from service.telemetry.metrics import Metrics

# _EXCHANGE_S: seconds that a rolling update may take to start replicas with the gateway's bundles. _AGAIN_S: seconds between two checks
# for such replicas.
_EXCHANGE_S, _AGAIN_S = 600.0, 0.5


class GatewayCatalog(Catalog):
    """The models of a gateway. They have tokenizers, templates and manifests, but no sessions of ONNX Runtime. The encoder pool
    serves all encoders, and the generator pool all decoders and encoder-decoders.
    """

    def __init__(self, settings: Settings, *, encoders: Pool | None, generators: Pool | None, metrics: Metrics | None = None) -> None:
        """A pool is None if no bundle is of the pool's kind."""
        super().__init__(settings, metrics)
        pools: dict[contract.Pool, Pool | None] = {"encoder": encoders, "generator": generators}
        self._replicas = {name: Replicas(pool) for name, pool in pools.items() if pool is not None}
        self._pools = list(self._replicas.values())

    async def connect(self) -> None:
        """Wait until every pool has a replica that responds and serves the gateway's own bundles. In a rolling update the first
        replica that responds may still have older bundles. Raises BundleError if no such replica responds within `_EXCHANGE_S`."""
        await asyncio.gather(*(pool.connect() for pool in self._pools))
        deadline = time.monotonic() + _EXCHANGE_S
        while (missing := await asyncio.to_thread(self._missing)) and time.monotonic() < deadline:
            self.failure = missing  # temporary: the reason why this gateway is not ready yet
            await asyncio.sleep(_AGAIN_S)
            for pool in self._pools:
                await pool.describe()
        if missing:
            raise contract.BundleError(missing)
        self.failure = None

    def _missing(self) -> str | None:
        """Return a message that names the first of the gateway's bundles that the replicas do not serve, or None if they serve all."""
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

    def open_encoder(self, model: Model) -> tuple[Encoder, str, SelfTest]:
        pool = self._replicas["encoder"]
        described = pool.described[model.name]
        limits = EncoderLimits(**described["limits"])
        engine = PoolEncoder(pool, model.name, model.manifest.fingerprint, limits, row_bytes(model.manifest))
        return engine, described["provider"], SelfTest(**described["selftest"])

    def open_generator(self, model: Generator) -> Generating:
        return PoolGenerator(self._replicas["generator"], model.name, model.manifest.fingerprint)

    open_encoder_decoder = open_generator

    def check_maps(self, bundle: Path, manifest: contract.Manifest) -> None:
        """Do nothing: the replicas have the graphs and check them."""

    async def attention(self, model: Served, ids: Sequence[int], layers: Sequence[int], deadline: float) -> list[Array]:
        return await ask_attention(
            self._replicas[model.manifest.traits.pool], (model.name, model.manifest.fingerprint), ids, layers, deadline
        )
