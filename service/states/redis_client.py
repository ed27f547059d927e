"""Connects to Redis, and checks its configuration when the store is opened."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from service.errors import StoreFailed

_CONNECT_S, _ANSWER_S = 2.0, 10.0

log = logging.getLogger("attnserve")


def connected(url: str, password: str | None) -> Any:
    """Return a client of one Redis server or of a cluster. Its type is Any, because redis-py's types also allow for asynchronous clients.

    Raises StoreFailed if Redis does not answer or may evict keys. Logs a warning if Redis may lose writes that it has acknowledged.
    """
    try:
        client = _client(url, password)
    except ValueError:  # the error's message is not shown, since it may contain the password
        raise StoreFailed("the URL of the store of states is invalid: expected redis://[USER@]HOST:PORT/DB or rediss://") from None
    with failing():
        memory, disk = client.info("memory"), client.info("persistence")
    if memory.get("maxmemory") and memory.get("maxmemory_policy") != "noeviction":
        raise StoreFailed(f"Redis may evict states: set maxmemory-policy to noeviction; it is {memory.get('maxmemory_policy')}")
    if (loss := _loss(client, append_only=bool(disk.get("aof_enabled")))) is not None:
        log.warning("the store of states in Redis can lose what it has acknowledged: %s; docs/states.md says what is lost", loss)
    return client


def _loss(client: Any, *, append_only: bool) -> str | None:
    """Return a text about the acknowledged writes that Redis may lose and the setting that prevents it, or None if it loses no writes."""
    if not append_only:
        return "without an append-only file, all of it is lost when Redis ends. Set appendonly yes and appendfsync always"
    synced = None
    with suppress(redis.RedisError):  # managed Redis servers refuse the command CONFIG
        synced = client.config_get("appendfsync").get("appendfsync")
    if synced is None:
        return "it refuses CONFIG GET, so its appendfsync is unknown. Power loss takes nothing with appendfsync always"
    if synced != "always":
        return f"appendfsync is {synced}, and power loss takes what is not synced. Set appendfsync always"
    return None


def _client(url: str, password: str | None) -> Any:
    # The client does not retry, because Redis may have carried out a call that failed.
    options: dict[str, Any] = {"socket_connect_timeout": _CONNECT_S, "socket_timeout": _ANSWER_S, "socket_keepalive": True, "protocol": 2}
    options |= {"retry": Retry(NoBackoff(), 0)} | ({} if password is None else {"password": password})
    client = redis.Redis.from_url(url, **options)
    with failing():
        clustered: Any = client.info("cluster")
        if not clustered.get("cluster_enabled"):
            return client
        client.close()
        return redis.RedisCluster.from_url(url, **options)


@contextmanager
def failing() -> Iterator[None]:
    """Raise StoreFailed in place of an error of Redis or of the connection."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StoreFailed(f"the store of states failed: {type(error).__name__}: {reason}; send the request again later") from error
