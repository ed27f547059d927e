"""The second graph of a bundle: the ids of one text in, and what every layer attends to out, a matrix (H, N, N) a layer.

The served graph has no such matrix: its attention is one operator, or never forms pairs at all. Here every layer is run once more on what
it gets, with values that are 1 for one token and 0 for all others, as in models/maps/matrix.py: what comes out are columns of the
matrix. A head takes D_v tokens at a time, so the text is copied into R = N / D_v rows, each with values of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export import contract
from export.graphs.decoder_operators import FORMS, with_operators
from export.graphs.decoder_step import OPSET as CAUSAL_OPSET
from export.graphs.encoder import EXAMPLE_TOKENS
from export.graphs.packed_encoder import FusedAttention, PackedEncoder, Packing, with_children
from export.graphs.torch_graph import OPSET, quiet, strip
from models.attention.layers.multi_head import split_heads
from models.decoder.model import Decoder
from models.encoder.model import Encoder


def trace_maps(model: Encoder | Decoder, file: Path, *, longest: int) -> None:
    """Write the graph for texts of 1 to `longest` tokens, its weights in a second file. The model is left as it was."""
    decoder = isinstance(model, Decoder)
    maps = DecoderMaps(model) if isinstance(model, Decoder) else EncoderMaps(model)
    example = torch.zeros(1, min(EXAMPLE_TOKENS, longest - 1), dtype=torch.int64)
    with quiet(), with_operators(model):
        torch.onnx.export(
            maps,
            (example,),
            file,
            dynamo=True,
            dynamic_shapes=({1: torch.export.Dim("N", max=longest)},),
            input_names=[contract.INPUT_IDS],
            output_names=[contract.attention_output(number) for number in range(model.config.n_layers)],
            opset_version=CAUSAL_OPSET if decoder else OPSET,
            custom_translation_table=FORMS if decoder else None,
            external_data=True,
            verbose=False,
        )
    strip(file)


class EncoderMaps(nn.Module):
    """ids (1, N) -> A of every layer, (H, N, N) each. The encoder is the packed one, whose weights are those of the served graph."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.encoder = PackedEncoder(encoder, separate_projections=False, first_token_only=False)
        for block in self.encoder.blocks:
            block.attention = WatchedInEncoder(block.attention, self.found)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        self.found.clear()
        self.encoder(input_ids, torch.ones_like(input_ids))
        return tuple(self.found)


class WatchedInEncoder(nn.Module):
    """An attention layer at its place, which leaves its matrix behind."""

    def __init__(self, placed: Any, found: list[Tensor]) -> None:
        super().__init__()
        self.placed = placed
        self.found = found

    def forward(self, x: Tensor, packing: Packing, **pairs: Any) -> Tensor:
        layer = self.placed.layer
        if isinstance(self.placed, FusedAttention) and pairs["rotation"] is None:
            layer = with_children(layer, to_q=Slice(self.placed, 0), to_k=Slice(self.placed, 1))
        N = packing.mask.shape[1]
        self.found.append(
            _of_unit_values(layer, packing.unpack(x), lambda twin, rows: twin(rows, packing.mask.expand(rows.shape[0], N), **pairs))
        )
        return self.placed(x, packing, **pairs)


class DecoderMaps(nn.Module):
    """The same of a decoder, from a text's first token on."""

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
    """A causal layer at its place, which leaves its matrix behind."""

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
    """x (1, N, D) -> (H, N, N). `run` calls a twin of the layer, which projects no answers, on rows (R, N, D)."""
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
    """A copy of the layer in which the part of this dotted name passes on what it is given."""
    first, _, rest = name.partition(".")
    return with_children(layer, **{first: _without(getattr(layer, first), rest) if rest else nn.Identity()})


def _of_recurrence(layer: Any, x: Tensor, rotation: Any) -> Tensor:
    """Its queries, keys and rates are caught on their way, and it is run once more, with N values of N columns."""
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
    """In the place of a projection of values: the same units for every head, (R, N, D_v) -> (R, N, H D_v) or, narrow, (R, H, N, D_v)."""

    def __init__(self, units: Tensor, to_v: nn.Module) -> None:
        super().__init__()
        self.units = units
        self.n_heads = to_v.out_features // units.shape[-1] if isinstance(to_v, nn.Linear) else 1

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return self.units.unsqueeze(1).expand(-1, x.shape[1], -1, -1)
        return self.units.repeat(1, 1, self.n_heads)


class Open(nn.Module):
    """In the place of a gate's projection: what opens it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x[..., :1], self.value)


class Slice(nn.Module):
    """The projection of queries (part 0) or keys (1), out of the one matrix that the served graph has for all three."""

    def __init__(self, fused: FusedAttention, part: int) -> None:
        super().__init__()
        self.fused = fused
        width = fused.layer.n_heads * fused.layer.d_head
        self.columns = slice(part * width, (part + 1) * width)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.fused.qkv_weight[:, self.columns]
        return y if self.fused.qkv_bias is None else y + self.fused.qkv_bias[self.columns]
