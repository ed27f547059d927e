"""The sizes and limits of a comparison. Results measured under a different plan are measured again."""

from pydantic import BaseModel, ConfigDict, Field

GiB = 2**30
LENGTHS = tuple(64 * 2**i for i in range(9))  # sequence lengths N in tokens: 64 .. 16,384
PARITY_SIZES = ((1, 1), (1, 2), (2, 31), (3, 64), (2, 65), (1, 300))  # (B, N) of the inputs for which onnxruntime is compared with torch
RANK_WIDTHS = (4, 8, 16, 32)  # widths D_k of a head at which ranks are computed
# (B, N) of the traced example. N is more than one chunk, block or group, because the exporter makes a count of 1 a constant.
EXAMPLE = (3, 519)


class ComparisonPlan(BaseModel):
    """Sizes and limits of a comparison."""

    model_config = ConfigDict(frozen=True)

    d_model: int = Field(default=128, ge=2)
    n_heads: int = Field(default=2, ge=1)
    lengths: tuple[int, ...] = LENGTHS  # ascending
    parity_sizes: tuple[tuple[int, int], ...] = PARITY_SIZES
    rank_length: int = 64  # N of the matrices whose rank is computed
    rank_widths: tuple[int, ...] = RANK_WIDTHS
    width_length: int = 4096  # N of the runs with several values of the option that a mechanism's `examples.varied` names
    seconds: float = Field(default=0.5, gt=0)  # time for which the runs of one length are repeated
    longest_run_s: float = Field(default=60.0, gt=0)  # a length at which one run would take longer is skipped
    memory_bytes: int = Field(default=6 * GiB, gt=0)  # a length at which a run would need more memory is skipped
    runtime: str = Field(default="onnxruntime", pattern="^(onnxruntime|torch)$")

    @property
    def longest(self) -> int:
        """The largest N that is run or traced."""
        return max(*self.lengths, self.width_length, *(N for _, N in self.parity_sizes), EXAMPLE[1])
