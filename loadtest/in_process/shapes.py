"""The shapes of the decoders in a paper's image experiments, with the paper's measurements.

The paper is Katharopoulos et al. 2020, arXiv:2006.16236: tables 1 and 2 (images per second on a GPU, at the best batch size) and table 5
(time of one image on an unnamed CPU). The paper's decoder predicts a pixel by the parameters of logistic distributions; our decoder
predicts one of 256 values.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder's shape, and the length in tokens (`steps`) of the sequences that it generates."""

    name: str
    steps: int
    n_layers: int
    d_model: int = 256
    n_heads: int = 8
    d_feedforward: int = 1024
    paper_ms: float  # milliseconds per token at batch size 1 on the paper's CPU
    paper_times: float  # on the paper's GPU: throughput of linear attention / of softmax with a KV cache, each at its best batch size


SHAPES = (
    ModelShape(name="MNIST", steps=784, n_layers=8, paper_ms=7.0, paper_times=142.8 / 7.56),
    ModelShape(name="CIFAR", steps=3072, n_layers=16, paper_ms=14.7, paper_times=17.85 / 0.32),
)
MEMORY_BYTES = 4 * 2**30  # largest memory for the states or KV caches of a batch
POSITIONS = (256, 512, 784, 1024, 2048, 3072)  # positions at which one step is timed, with linear and with softmax attention
