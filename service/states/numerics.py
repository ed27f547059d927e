"""Names the arithmetic of a machine, so that a state continues elsewhere to the bit, or not without its owner's consent."""

import hashlib


def numerics_fingerprint(graph_sha256: str, runtime_version: str, provider: str, golden_logits: str) -> str:
    """Return 16 hex digits. Two engines of one bundle with equal fingerprints compute equal bits.

    The instructions that the processor has are not named: AVX2 and AVX-512 round differently, and `golden_logits`, the checksum of the
    logits that this process has computed in its self-test, differs where the rounding does.
    """
    parts = "\0".join((graph_sha256, runtime_version, provider, golden_logits))
    return hashlib.sha256(parts.encode()).hexdigest()[:16]
