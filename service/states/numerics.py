"""Identifies the arithmetic of a machine. By default, a state is continued only on machines that compute the same bits."""

import hashlib


def numerics_fingerprint(graph_sha256: str, runtime_version: str, provider: str, golden_logits: str, sampler: int) -> str:
    """Return a fingerprint of 16 hex digits. Two engines of one bundle with equal fingerprints compute equal bits and draw equal tokens.

    The processor's instruction set is not an argument. AVX2 and AVX-512 round differently, but `golden_logits` shows this: it is the
    checksum of the logits that this process has computed in its self-test. `sampler` is the version of the code that draws tokens.
    """
    parts = "\0".join((graph_sha256, runtime_version, provider, golden_logits, str(sampler)))
    return hashlib.sha256(parts.encode()).hexdigest()[:16]
