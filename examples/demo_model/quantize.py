"""MLX's affine quantization in PyTorch, so that training can feel what 4 bits will do.

Invariant: `fake_quantize` gives what `mx.dequantize(*mx.quantize(...))` gives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROUP_SIZE = 64


def fake_quantize(groups: Tensor, bits: int) -> Tensor:
    """Each row of `groups` `[n, GROUP_SIZE]` rounded to `bits` bits with its own scale and bias."""
    n_bins = 2**bits - 1
    high, low = groups.amax(1, keepdim=True), groups.amin(1, keepdim=True)
    low_is_edge = low.abs() > high.abs()
    scale = ((high - low) / n_bins).clamp(min=1e-7)
    scale = torch.where(low_is_edge, scale, -scale)
    edge = torch.where(low_is_edge, low, high)
    at_edge = (edge / scale).round()
    scale = torch.where(at_edge != 0, edge / at_edge, scale)
    bias = torch.where(at_edge == 0, 0.0, edge)
    return ((groups - bias) / scale).round().clamp(0, n_bins) * scale + bias


def bits_of(name: str) -> int | None:
    """How `mlx_lm.convert -q --q-bits 4` stores a parameter: 8 bits for the gates, None for what stays as it is."""
    if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
        return 8
    if name.endswith(("conv1d.weight", "A_log", "dt_bias")) or "norm" in name:
        return None
    return 4


class QuantizedWeights:
    """Quantized weights for a forward and backward pass, whose gradients go to the exact ones (straight-through)."""

    def __init__(self, model: nn.Module) -> None:
        self.sets: dict[int, list[nn.Parameter]] = {4: [], 8: []}
        for name, parameter in model.named_parameters():
            if bits := bits_of(name):
                self.sets[bits].append(parameter)
        self.exact: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def swap_in(self) -> None:
        """Exact weights are put aside, quantized ones take their place."""
        for bits, parameters in self.sets.items():
            flat = torch.cat([p.detach().reshape(-1, GROUP_SIZE) for p in parameters])
            self.exact[bits] = [p.detach().clone() for p in parameters]
            rounded = fake_quantize(flat, bits).split([p.numel() // GROUP_SIZE for p in parameters])
            torch._foreach_copy_(
                [p.detach() for p in parameters], [r.view_as(p) for r, p in zip(rounded, parameters, strict=True)]
            )

    @torch.no_grad()
    def swap_out(self) -> None:
        """The exact weights come back."""
        for bits, parameters in self.sets.items():
            torch._foreach_copy_([p.detach() for p in parameters], self.exact[bits])
