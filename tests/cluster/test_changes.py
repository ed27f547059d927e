"""What an operator changes on a running cluster, under load: no request fails, and no stream is cut."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from service.deployment.scaling import ENCODER_TARGET, autoscaling
from tests.bundles import tiny_encoder_bundle
from tests.cluster.conftest import WORKERS
from tests.cluster.load import Load, held
from tests.cluster.nodes import Cluster
from tests.cluster.test_logs import records
from tests.service.fakes import PATIENCE_S

pytestmark = [pytest.mark.live, pytest.mark.alone]
DEPLOYMENTS = ("gateway", "encoder", "generator")
MODELS = {"encoder": "tiny-encoder", "generator": "tiny-decoder"}


@pytest.fixture
def load(cluster: Cluster) -> Iterator[Load]:
    """Through the HAProxy of both workers in turn."""
    with Load([cluster.url(name) for name in WORKERS]) as made:
        made.more(20)
        yield made


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder_bundle(tmp_path_factory.mktemp("second") / "second", name="second")


def names(cluster: Cluster) -> set[str]:
    return {replica["replica_id"] for deployment in DEPLOYMENTS for replica in cluster.replicas(deployment)}


def test_a_rolling_update_costs_nothing(cluster: Cluster, load: Load) -> None:
    """A setting that is read at start: every replica of every deployment is replaced, one after the other."""
    before = names(cluster)
    with held([cluster.url(name) for name in WORKERS]):
        cluster.deploy(args={"bulk_delay_s": 1.5})
        cluster.until(partial(leaving, cluster, before), "replicas of every deployment leave, under streams")
    cluster.until(lambda: cluster.settled() and not names(cluster) & before, "every replica is a new one")
    load.more(20)
    assert load.failures() == []


def test_a_bundle_is_added_without_loss(cluster: Cluster, load: Load, second: Path) -> None:
    """How a model is exchanged in place: the new one under a name of its own, beside the old one. Gateways that have it already wait for
    replicas that have it too."""
    (application,) = cluster.config["applications"]
    cluster.deploy(args={"bundles": [*application["args"]["bundles"], str(second)]})
    cluster.until(
        lambda: cluster.settled() and cluster.ready(*WORKERS) and statuses(cluster, 1, "second") == {200}, "the new model answers"
    )
    assert load.failures() == []


def test_live_settings_change_in_place(cluster: Cluster, load: Load) -> None:
    before = names(cluster)
    cluster.deploy(gateway={"user_config": {"max_client_batch": 3}})
    cluster.until(lambda: statuses(cluster, 4) == {400}, "a request of four inputs is refused")
    assert statuses(cluster, 3) == {200}
    cluster.deploy(gateway={"user_config": {"max_client_batch": 2048}})
    cluster.until(lambda: statuses(cluster, 4) == {200}, "it is taken again")
    cluster.until(cluster.settled, "the change is through")
    assert names(cluster) == before
    assert load.failures() == []


def test_scaling_costs_nothing(cluster: Cluster, load: Load) -> None:
    """Down: who leaves finishes what it has. Up: the new ones get their share when they are ready."""
    before = names(cluster)
    with held([cluster.url(name) for name in WORKERS]):
        cluster.deploy(**{name: {"num_replicas": 1} for name in DEPLOYMENTS})
        cluster.until(partial(leaving, cluster, before), "a replica of every deployment leaves, under streams")
    for number in (1, 2):
        cluster.deploy(**{name: {"num_replicas": number} for name in DEPLOYMENTS})
        cluster.until(partial(scaled, cluster, number), f"there are {number} of each")
        load.more(20)
    assert load.failures() == []


def test_a_pool_follows_the_work_that_it_is_asked_for(cluster: Cluster, load: Load) -> None:
    """Autoscaling is switched on, which replaces every replica. While more is asked than one encoder can do there are two, and silence
    gives the second back: as `max_encoders` has it, but for the delays."""

    def deploy(least: int) -> None:
        scaling = autoscaling(least, 2, ENCODER_TARGET) | {"upscale_delay_s": 0}
        scaling["policy"]["policy_kwargs"]["keep_s"] = 1
        cluster.deploy(encoder={"autoscaling_config": scaling})

    before = names(cluster)
    deploy(2)
    try:
        cluster.until(lambda: cluster.settled() and not names(cluster) & before, "every replica is a new one")
        deploy(1)
        cluster.until(partial(scaled, cluster, 1, "encoder"), "there is one encoder under a small load")
        load.stop()
        assert load.failures() == []
        with queued(cluster) as failed:
            cluster.until(lambda: failed() or scaled(cluster, 2, "encoder"), "there are two encoders under load")
            assert failed() is None
        cluster.until(partial(scaled, cluster, 1, "encoder"), "there is one encoder in silence")
    finally:  # two first: Serve stops a replica before it starts the one that replaces it
        deploy(2)
        cluster.until(partial(scaled, cluster, 2, "encoder"), "there are two again")
        between = names(cluster)
        cluster.deploy(encoder={"num_replicas": 2})
        cluster.until(lambda: cluster.settled() and not names(cluster) & between, "every replica is a new one again")


def test_pools_run_on_the_nodes_that_have_their_resource(cluster: Cluster) -> None:
    """A custom resource of Ray keeps each pool on its own nodes, and a replica has a thread for each CPU that is reserved for it: so
    deploy/chart separates the workers of encoders and generators. Each node of this cluster has a resource of its name."""
    placed = {"encoder": ("one", 2), "generator": ("two", 1)}
    before = names(cluster)
    options = {
        pool: {"num_replicas": 1, "ray_actor_options": {"num_cpus": cpus, "resources": {node: 1}}} for pool, (node, cpus) in placed.items()
    }
    cluster.deploy(**options)
    try:
        cluster.until(lambda: cluster.settled() and len(names(cluster) - before) == 2, "both pools have been placed anew")
        for pool, (node, cpus) in placed.items():
            assert [replica["node_ip"] for replica in cluster.replicas(pool)] == [cluster.address(node)]
            loaded = [each for each in records(cluster, node) if each["message"] == "loaded" and each["model"] == MODELS[pool]]
            assert loaded[-1]["threads"] == cpus
    finally:
        cluster.deploy(**{pool: {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}} for pool in placed})
        cluster.until(partial(scaled, cluster, 2), "there are two of each again")


@contextmanager
def queued(cluster: Cluster) -> Iterator[Callable[[], str | None]]:
    """Tokens wait all the time: four clients send one large request after the other. Of token ids, which cost the gateway little: it is the
    encoder that is to have too much to do. Gives what has ended one of them."""
    over = threading.Event()

    def ask(client: int) -> None:
        for number in count():
            if over.is_set():
                return
            ids = random.Random(f"{client} {number}").choices(range(5, 150), k=2000 * 60)
            inputs = [ids[first : first + 60] for first in range(0, len(ids), 60)]
            body = json.dumps({"model": "tiny-encoder", "input": inputs, "dimensions": 1}).encode()
            request = Request(f"{cluster.url('one')}/v1/embeddings", body, {"content-type": "application/json"})
            try:
                with urlopen(request, timeout=PATIENCE_S) as answer:
                    answer.read()
            except HTTPError as error:
                if error.code != 429:
                    raise AssertionError(f"{error.code}: {error.read()!r}") from None
                error.close()

    with ThreadPoolExecutor(4) as clients:
        asking = [clients.submit(ask, client) for client in range(4)]
        try:
            yield lambda: next((repr(client.exception()) for client in asking if client.done()), None)
        finally:
            over.set()
        for client in asking:
            client.result()


def leaving(cluster: Cluster, before: set[str]) -> bool:
    """Of every deployment, one of these replicas runs no more."""
    return all(len(before & {each["replica_id"] for each in cluster.replicas(name)}) < 2 for name in DEPLOYMENTS)


def scaled(cluster: Cluster, number: int, *deployments: str) -> bool:
    return cluster.settled() and all(len(cluster.replicas(name)) == number for name in deployments or DEPLOYMENTS)


def statuses(cluster: Cluster, inputs: int, model: str = "tiny-encoder") -> set[int]:
    """Of requests of so many inputs, enough of them to have reached every gateway: HAProxy asks them in turn."""
    body = json.dumps({"model": model, "input": ["a bird"] * inputs}).encode()
    found = set()
    for name in WORKERS * 4:
        try:
            with urlopen(
                Request(f"{cluster.url(name)}/v1/embeddings", body, {"content-type": "application/json"}), timeout=PATIENCE_S
            ) as answer:
                found.add(answer.status)
        except HTTPError as error:
            found.add(error.code)
            error.close()
    return found
