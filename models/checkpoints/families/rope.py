"""Reads the rotary settings of decoders, in the forms that transformers 4 and 5 write.

transformers 4: `rope_theta` and `rope_scaling` (null, or an object with `type` or `rope_type`). transformers 5: `rope_parameters`, one
object with `rope_type`, `rope_theta` and the scaling. Where a value is absent, the same default applies as in transformers.
"""

import math
from typing import Any, get_args

from models.folders.folder import CheckpointError, JsonSettings
from models.parts.rotary import Kind, RotaryScaling

KINDS = {kind: kind for kind in ("default", *get_args(Kind))}


def read_rope(settings: JsonSettings, *, theta: float = 10_000.0) -> dict[str, Any]:
    """Return the fields `rotary_base` and `rotary_scaling` of DecoderConfig. `theta` is the family's base if the settings have none.

    Raises CheckpointError or ValueError for a scaling that is unsupported or has invalid values.
    """
    values = settings.get("rope_scaling", None) or settings.get("rope_parameters", {})
    if nested := [name for name, value in values.items() if isinstance(value, dict)]:
        raise CheckpointError(
            f"{settings.file}: rotary settings by type of layer ({', '.join(nested)}) are not supported; use another model"
        )
    rope = JsonSettings(values, settings.file)
    rope.allow("partial_rotary_factor", 1.0)
    kind = rope.pick("rope_type", rope.get("type", "default"), KINDS)
    base = rope.get("rope_theta", settings.get("rope_theta", theta))
    return {"rotary_base": float(base), "rotary_scaling": None if kind == "default" else _scaling(kind, rope, settings)}


def _scaling(kind: Any, rope: JsonSettings, settings: JsonSettings) -> RotaryScaling:
    trained = settings.get("max_position_embeddings", None)
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        original = settings.get(key, rope.get(key, trained))
        factor = rope.get("factor", trained / original if trained and original else None)
    else:
        original, factor = trained, rope.get("factor", None)
    if factor is None:
        raise CheckpointError(f"{settings.file}: the rotary scaling {kind!r} has no factor; add it, or copy the file again")
    options: dict[str, Any] = {}
    if kind == "llama3":
        options = {name: rope.need(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        options = {
            "beta_fast": rope.get("beta_fast", 32.0),
            "beta_slow": rope.get("beta_slow", 1.0),
            "truncate": rope.get("truncate", True),
            "attention_factor": _attention_factor(rope, factor),
        }
    return RotaryScaling(kind=kind, factor=float(factor), original_positions=original, **options)


def _attention_factor(rope: JsonSettings, factor: float) -> float | None:
    """Return the factor of yarn that the settings name, or that they derive from `mscale` and `mscale_all_dim` (DeepSeek-V2), else None."""
    given = rope.get("attention_factor", None)
    scales = [rope.get(name, None) for name in ("mscale", "mscale_all_dim")]
    if given is not None or None in scales:
        return given
    above, below = (0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0 for scale in scales)
    return above / below
