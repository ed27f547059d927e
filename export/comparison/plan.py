"""How large everything is that is compared. Results of another plan are not mixed with these."""

from pydantic import BaseModel, ConfigDict, Field

GiB = 2**30
LENGTHS = tuple(64 * 2**i for i in range(9))  # 64 .. 16,384
PARITY_SIZES = ((1, 1), (1, 2), (2, 31), (3, 64), (2, 65), (1, 300))  # B, N
RANK_WIDTHS = (4, 8, 16, 32)  # D_k
EXAMPLE = (3, 519)  # B, N with which a graph is traced: several of every chunk, block and group, since a count of 1 would become a constant


class Plan(BaseModel):
    """Sizes and limits of a comparison."""

    model_config = ConfigDict(frozen=True)

    d_model: int = Field(default=128, ge=2)
    n_heads: int = Field(default=2, ge=1)
    lengths: tuple[int, ...] = LENGTHS  # ascending
    parity_sizes: tuple[tuple[int, int], ...] = PARITY_SIZES
    rank_length: int = 64  # N of the matrices whose rank is taken
    rank_widths: tuple[int, ...] = RANK_WIDTHS
    width_length: int = 4096  # N at which the options that `examples.varied` names are varied
    seconds: float = Field(default=0.5, gt=0)  # so long is one length run, again and again
    longest_run_s: float = Field(default=60.0, gt=0)  # a length that would take longer is not tried
    memory_bytes: int = Field(default=6 * GiB, gt=0)  # nor is one that would take more
    runtime: str = Field(default="onnxruntime", pattern="^(onnxruntime|torch)$")

    @property
    def longest(self) -> int:
        """The largest N of anything that is run, or traced."""
        return max(*self.lengths, self.width_length, *(N for _, N in self.parity_sizes), EXAMPLE[1])
