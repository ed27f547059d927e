"""The attention graph of a bundle. It maps the ids of one text to one attention matrix (H, N, N) for each layer.

Each layer is run once more on its input, with values that are 1 for one token and 0 for all others, as in models/maps/matrix.py, so that
the output is a column of the matrix. The values of a head have D_v columns, so the text is repeated in R = N / D_v rows (rounded up).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export import contract
from export.checks.parity import open_graph
from export.errors import ExportError
from export.graphs.decoder_operators import FORMS, with_operators
from export.graphs.decoder_step import OPSET as CAUSAL_OPSET
from export.graphs.encoder import EXAMPLE_TOKENS
from export.graphs.packed_encoder import FusedAttention, Module, PackedEncoder, with_children
from export.graphs.shared_weights import share
from export.graphs.token_packing import TokenPacking
from export.graphs.torch_graph import OPSET, TorchGraph
from models.attention.layers.multi_head import split_heads
from models.decoder.model import Decoder
from models.encoder.model import Encoder
from models.layers import LAYERS
from models.maps.model import attention_maps
from models.parts.modules import Modules

TOLERANCE = 1e-4  # largest error of an attention weight; both compute in float32 and sum in different orders


def add_attention_graph(
    model: Encoder | Decoder, folder: Path, scratch: Path, *, max_tokens: int, vocab_size: int
) -> contract.AttentionGraph:
    """Write the attention graph into `folder`, beside the served graph.

    Raises ExportError if an attention weight differs from torch's by more than TOLERANCE.
    """
    longest = min(max_tokens, contract.LONGEST_ATTENTION)
    traced, file = scratch / contract.ATTENTION_GRAPH, folder / contract.ATTENTION_GRAPH
    trace_maps(model, traced, longest=longest)
    share(traced, folder / contract.GRAPH)
    traced.rename(file)
    session, random = open_graph(file), np.random.default_rng(0)
    largest = 0.0
    for N in dict.fromkeys(min(N, longest) for N in (1, 2, 17, longest)):
        ids = random.integers(0, vocab_size, (1, N))
        wanted, got = attention_maps(model, torch.from_numpy(ids)), session.run(None, {contract.INPUT_IDS: ids})
        if (found := [A.shape for A in got]) != (shapes := [tuple(each.A.shape) for each in wanted]):
            raise ExportError(f"the attention graph gives {found} at N={N}, but the model {shapes}")
        error = max(float(np.abs(each.A.float().numpy() - A).max()) for each, A in zip(wanted, got, strict=True))
        if not error <= TOLERANCE:  # not written as `error > TOLERANCE`, which is false for NaN
            raise ExportError(f"at N={N} a weight of the attention graph differs from torch's by {error:.3g}; the limit is {TOLERANCE:g}")
        largest = max(largest, error)
    layers = tuple(
        contract.AttentionLayer(attention=each.layer, heads=len(each.A), effective=LAYERS[each.layer].capabilities.effective)
        for each in wanted
    )
    return contract.AttentionGraph(file=file.name, layers=layers, max_tokens=longest, max_abs_error=largest)


def trace_maps(model: Encoder | Decoder, file: Path, *, longest: int) -> None:
    """Write the graph for texts of 1 to `longest` tokens, with its weights in a second file. The model is unchanged."""
    maps, opset, forms = (DecoderMaps(model), CAUSAL_OPSET, FORMS) if isinstance(model, Decoder) else (EncoderMaps(model), OPSET, {})
    outputs = tuple(contract.float32(contract.attention_output(number), "H", "N", "N") for number in range(model.config.n_layers))
    sizes = {"N": min(EXAMPLE_TOKENS, longest - 1)}
    graph = TorchGraph(maps, (contract.int64(contract.INPUT_IDS, 1, "N"),), outputs, sizes, longest, opset, forms)
    with with_operators(model):
        graph.export(file, weights_beside=True)


class EncoderMaps(nn.Module):
    """Maps ids (1, N) to the attention matrices (H, N, N) of all layers. The encoder is packed and has the served graph's weights."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.encoder = PackedEncoder(encoder, separate_projections=False, first_token_only=False)
        # Layers that share modules get modules of their own, with the same weights: torch cannot trace copies of a shared module.
        self.encoder.blocks = Modules(_with_own_modules(block) for block in self.encoder.blocks)
        for block in self.encoder.blocks:
            block.attention = WatchedInEncoder(block.attention, self.found)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        self.found.clear()
        self.encoder(input_ids, torch.ones_like(input_ids))
        return tuple(self.found)


class WatchedInEncoder(nn.Module):
    """A wrapper of an encoder's attention layer that also stores its attention matrix."""

    def __init__(self, placed: Any, found: list[Tensor]) -> None:
        super().__init__()
        self.placed = placed
        self.found = found

    def forward(self, x: Tensor, packing: TokenPacking, **pairs: Any) -> Tensor:
        layer = self.placed.layer
        if isinstance(self.placed, FusedAttention) and pairs["rotation"] is None:
            layer = with_children(layer, to_q=Slice(self.placed, 0), to_k=Slice(self.placed, 1))
        N = packing.mask.shape[1]
        self.found.append(
            _of_unit_values(layer, packing.unpack(x), lambda twin, rows: twin(rows, packing.mask.expand(rows.shape[0], N), **pairs))
        )
        return self.placed(x, packing, **pairs)


class DecoderMaps(nn.Module):
    """Maps the ids of one text to the attention matrices of all layers of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        blocks = [with_children(block, layer=WatchedInDecoder(block.layer, self.found)) for block in decoder.blocks]
        self.states = decoder.init_states
        self.decoder = with_children(decoder, blocks=nn.ModuleList(blocks))

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        self.found.clear()
        self.decoder(tokens, states=self.states(1), wanted=torch.zeros_like(tokens[:, :1]))
        return tuple(self.found)


class WatchedInDecoder(nn.Module):
    """A wrapper of a causal layer that also stores its attention matrix."""

    def __init__(self, layer: Any, found: list[Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.found = found

    def forward(self, x: Tensor, mask: Tensor | None, state: dict[str, Tensor], *, rotation: Any) -> Any:
        if self.layer.answers == "recurrence":
            self.found.append(_of_recurrence(self.layer, x, rotation))
        else:
            self.found.append(_of_unit_values(self.layer, x, lambda twin, rows: twin(rows, rotation=rotation)[0]))
        return self.layer(x, mask, state, rotation=rotation)


def _of_unit_values(layer: Any, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    """Return the layer's attention matrix: x (1, N, D) -> (H, N, N). `run` gets a copy of the layer and x repeated as (R, N, D)."""
    H, N = getattr(layer, "n_heads", 1), x.shape[1]
    D_v = layer.to_out.in_features // H
    R = (N + D_v - 1) // D_v
    units = nn.functional.pad(torch.eye(N, dtype=x.dtype), (0, R * D_v - N)).unflatten(1, (R, D_v)).transpose(0, 1)  # (R, N, D_v)
    values = Values(units * layer.value_of_one, layer.to_v)
    parts: dict[str, nn.Module] = {name: values for name in ("to_v", "to_v_global") if hasattr(layer, name)}
    parts |= {name: Open(value) for name, value in layer.gates}
    twin = _without(with_children(layer, **parts, to_out=nn.Identity()), layer.answers)
    o = run(twin, x.expand(R, -1, -1))  # (R, N, H D_v)
    return split_heads(o, H).permute(1, 2, 0, 3).flatten(2)[..., :N].float()


def _without(layer: nn.Module, name: str) -> nn.Module:
    """Return a copy of the layer in which the submodule with this dotted name is replaced by the identity."""
    first, _, rest = name.partition(".")
    return with_children(layer, **{first: _without(getattr(layer, first), rest) if rest else nn.Identity()})


def _with_own_modules(module: Module) -> Module:
    """Return a copy of the module and of all modules in it. The copies have the same parameters."""
    return with_children(module, **{name: _with_own_modules(child) for name, child in module.named_children()})


def _of_recurrence(layer: Any, x: Tensor, rotation: Any) -> Tensor:
    """Return a recurrent layer's attention matrix (H, N, N) for x (1, N, D), by a second run of the recurrence with the identity matrix as
    values.
    """
    caught: dict[str, Any] = {}
    twin = with_children(layer)

    def catch(q: Tensor, k: Tensor, v: Tensor, S: Tensor, **rates: Tensor | None) -> tuple[Tensor, Tensor]:
        caught.update(q=q, k=k, rates=rates)
        o, S_new = layer.recurrence(q, k, v, S, **rates)
        return o, S_new

    twin.recurrence = catch
    twin(x, rotation=rotation)
    k = caught["k"]  # (1, H, N, D_k)
    _, H, N, D_k = k.shape
    each = torch.eye(N, dtype=k.dtype).expand(1, H, N, N)
    A, _ = layer.recurrence(caught["q"], k, each, each.new_zeros(1, H, D_k, N), **caught["rates"])
    return A[0].float()


class Values(nn.Module):
    """Replaces a value projection by the same values for any x: (R, N, H D_v), or (R, H, N, D_v) if x has 4 dimensions."""

    def __init__(self, units: Tensor, to_v: nn.Module) -> None:
        super().__init__()
        self.units = units
        self.n_heads = to_v.out_features // units.shape[-1] if isinstance(to_v, nn.Linear) else 1

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return self.units.unsqueeze(1).expand(-1, x.shape[1], -1, -1)
        return self.units.repeat(1, 1, self.n_heads)


class Open(nn.Module):
    """Replaces the projection of a gate. It returns a constant, `value`, for which the gate is 1."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x[..., :1], self.value)


class Slice(nn.Module):
    """The projection of queries (part 0) or keys (part 1), a slice of the served graph's fused projection of q, k and v."""

    def __init__(self, fused: FusedAttention, part: int) -> None:
        super().__init__()
        self.fused = fused
        width = fused.layer.n_heads * fused.layer.d_head
        self.columns = slice(part * width, (part + 1) * width)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.fused.qkv_weight[:, self.columns]
        return y if self.fused.qkv_bias is None else y + self.fused.qkv_bias[self.columns]
