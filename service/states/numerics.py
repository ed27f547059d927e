"""Identifies the arithmetic of a machine. A state continues on another machine with equal bits, or only with its owner's consent."""

import hashlib


def numerics_fingerprint(graph_sha256: str, runtime_version: str, provider: str, golden_logits: str) -> str:
    """Return 16 hex digits. Two engines of one bundle with equal fingerprints compute equal bits.

    The processor's instructions are not part of the name. AVX2 and AVX-512 round differently, but then `golden_logits` differs too: it is
    the checksum of the logits that this process has computed in its self-test.
    """
    parts = "\0".join((graph_sha256, runtime_version, provider, golden_logits))
    return hashlib.sha256(parts.encode()).hexdigest()[:16]
