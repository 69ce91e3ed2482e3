"""The demo's architecture in PyTorch: a text model of the kind qwen3_5_moe, named as released checkpoints are.

Knows the forward pass over whole sequences, fast enough to train. Does not know text, and has no cache: mlx-lm runs it.
Invariant: `evaluate.py --reference` finds the logits of transformers and mlx-lm equal to these up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes. An expert in 4 bits, groups of 64 and float32 scales, takes 15,360 bytes: just under a stride."""

    vocab_size: int = 4096
    hidden_size: int = 128
    n_layers: int = 8
    full_attention_interval: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 10_000.0
    linear_k_heads: int = 4
    linear_v_heads: int = 8
    linear_head_dim: int = 32
    conv_kernel: int = 4
    n_experts: int = 48
    top_k: int = 4
    moe_size: int = 64
    shared_size: int = 128
    eps: float = 1e-6

    def as_json(self, eos_ids: list[int]) -> dict[str, object]:
        """`config.json` as released models have it: the text model nested in a model that lacks its vision part."""
        text = {
            "model_type": "qwen3_5_moe_text",
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.n_layers,
            "full_attention_interval": self.full_attention_interval,
            "layer_types": [
                "linear_attention" if self.is_linear(i) else "full_attention" for i in range(self.n_layers)
            ],
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attn_output_gate": True,
            "linear_num_key_heads": self.linear_k_heads,
            "linear_num_value_heads": self.linear_v_heads,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_head_dim,
            "linear_conv_kernel_dim": self.conv_kernel,
            "num_experts": self.n_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.moe_size,
            "shared_expert_intermediate_size": self.shared_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
            "tie_word_embeddings": True,
            "eos_token_id": eos_ids[0],
            "use_cache": True,
        }
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": text,
            "tie_word_embeddings": True,
            "eos_token_id": eos_ids,
        }

    def is_linear(self, layer: int) -> bool:
        """Three layers of Gated DeltaNet to one of attention."""
        return (layer + 1) % self.full_attention_interval != 0


class Norm(nn.Module):
    """RMS norm whose stored weight is the scale minus one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm, then a gate. Its weight is stored as it is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y * F.silu(gate.float())


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The gated delta rule from an empty state, in chunks (Yang et al., "Gated Delta Networks", 2024).

    Per head: S_t = exp(log_decay_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, and the output is S_t^T q_t.

    Args:
        q, k: float32 `[batch, heads, length, d_k]`, normalised, q scaled.
        v: float32 `[batch, heads, length, d_v]`.
        log_decay, beta: float32 `[batch, heads, length]`.
        chunk: length must be a multiple of it.

    Returns:
        float32 `[batch, heads, length, d_v]`.
    """
    b, h, length, d_k = q.shape
    n = length // chunk
    q, k, v = (x.reshape(b, h, n, chunk, -1) for x in (q, k, v))
    beta = beta.reshape(b, h, n, chunk, 1)
    # The log of the decay from the start of the chunk through each token.
    total = log_decay.reshape(b, h, n, chunk).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # decay[i, j] = what is left at token i of what token j wrote. Mask before exp, which would overflow above.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -math.inf).exp()
    k_beta = k * beta
    # Writes of a chunk depend on one another: solve (I + strict_lower(k_beta k^T decay)) x = right sides.
    system = (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
    right = torch.cat([v * beta, k_beta * total.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes, reads = solved.split([v.shape[-1], d_k], dim=-1)
    inside = q @ k.transpose(-1, -2) * decay
    q_decayed = q * total.exp()[..., None]
    k_left = k * (total[..., -1:] - total).exp()[..., None]
    whole = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(b, h, d_k, v.shape[-1])
    outputs = []
    for i in range(n):
        new = writes[:, :, i] - reads[:, :, i] @ state
        outputs.append(q_decayed[:, :, i] @ state + inside[:, :, i] @ new)
        state = state * whole[:, :, i] + k_left[:, :, i].transpose(-1, -2) @ new
    return torch.stack(outputs, 2).reshape(b, h, length, -1)


class GatedDeltaNet(nn.Module):
    """Linear attention with a causal convolution over four tokens before it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.k_size, self.v_size = c.linear_k_heads * c.linear_head_dim, c.linear_v_heads * c.linear_head_dim
        channels = 2 * self.k_size + self.v_size
        self.in_proj_qkv = nn.Linear(c.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(c.hidden_size, self.v_size, bias=False)
        self.in_proj_b = nn.Linear(c.hidden_size, c.linear_v_heads, bias=False)
        self.in_proj_a = nn.Linear(c.hidden_size, c.linear_v_heads, bias=False)
        self.conv1d = nn.Conv1d(
            channels, channels, c.conv_kernel, groups=channels, bias=False, padding=c.conv_kernel - 1
        )
        self.A_log = nn.Parameter(torch.empty(c.linear_v_heads).uniform_(1, 16).log())
        step = torch.empty(c.linear_v_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is `step`
        self.norm = GatedNorm(c.linear_head_dim, c.eps)
        self.out_proj = nn.Linear(self.v_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        b, length, _ = x.shape
        mixed = self.in_proj_qkv(x)
        # A depthwise convolution as four shifted products: faster than the library's on these shapes.
        padded = F.pad(mixed, (0, 0, c.conv_kernel - 1, 0))
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)
        mixed = sum(
            (padded[:, i : i + length] * taps[:, i] for i in range(c.conv_kernel)), start=torch.zeros_like(mixed)
        )
        mixed = F.silu(mixed)
        q, k, v = mixed.float().split([self.k_size, self.k_size, self.v_size], dim=-1)
        q, k, v = (t.view(b, length, -1, c.linear_head_dim).transpose(1, 2) for t in (q, k, v))
        q, k = (t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        repeat = c.linear_v_heads // c.linear_k_heads
        q, k = (t.repeat_interleave(repeat, dim=1) for t in (q * c.linear_head_dim**-0.5, k))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        log_decay = (-self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            y = gated_delta_rule(q, k, v, log_decay, beta).transpose(1, 2)
        z = self.in_proj_z(x).view(b, length, -1, c.linear_head_dim)
        return self.out_proj(self.norm(y, z).reshape(b, length, -1).to(mixed.dtype))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Grouped-query attention with norms on queries and keys, partial rotary positions and an output gate."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, 2 * c.n_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.n_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.eps)
        self.k_norm = Norm(c.head_dim, c.eps)

    def _rotate(self, x: Tensor) -> Tensor:
        c = self.c
        half = c.rotary_dim // 2
        frequency = c.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b, rest = x.split([half, half, c.head_dim - c.rotary_dim], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        b, length, _ = x.shape
        q, gate = self.q_proj(x).view(b, length, c.n_heads, 2 * c.head_dim).chunk(2, dim=-1)
        k = self.k_proj(x).view(b, length, c.n_kv_heads, c.head_dim)
        v = self.v_proj(x).view(b, length, c.n_kv_heads, c.head_dim).transpose(1, 2)
        q, k = self._rotate(self.q_norm(q).transpose(1, 2)), self._rotate(self.k_norm(k).transpose(1, 2))
        k, v = (t.repeat_interleave(c.n_heads // c.n_kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True).transpose(1, 2)
        return self.o_proj((y * gate.sigmoid()).reshape(b, length, -1))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """The shared expert."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Experts(nn.Module):
    """All routed experts of a layer in two stacks, gate and up fused."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(c.n_experts, 2 * c.moe_size, c.hidden_size).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(c.n_experts, c.hidden_size, c.moe_size).normal_(std=0.02))

    def forward(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        """x `[tokens, hidden]`, chosen and weight `[tokens, top_k]`."""
        n_experts, top_k = self.gate_up_proj.shape[0], chosen.shape[1]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(n_experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        rows = x[order // top_k]
        if x.is_cuda:
            ends = counts.cumsum(0, dtype=torch.int32)
            rows = rows.bfloat16()
            gate, up = torch._grouped_mm(rows, self.gate_up_proj.bfloat16().transpose(1, 2), offs=ends).chunk(2, dim=-1)
            y = torch._grouped_mm(F.silu(gate) * up, self.down_proj.bfloat16().transpose(1, 2), offs=ends)
        else:
            parts = []
            for expert, part in enumerate(rows.split(counts.tolist())):
                gate, up = F.linear(part, self.gate_up_proj[expert]).chunk(2, dim=-1)
                parts.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
            y = torch.cat(parts)
        y = torch.empty_like(y).index_copy(0, order, y).view(len(x), top_k, -1)  # back to the order of the tokens
        return (y * weight[..., None].to(y.dtype)).sum(1)


class Router(nn.Module):
    """Scores every expert."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.n_experts, c.hidden_size).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight).softmax(-1)


class SparseMoe(nn.Module):
    """The router's best few experts and the shared one. Keeps the picks of the last pass, for the balance term."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.top_k = c.top_k
        self.gate = Router(c)
        self.experts = Experts(c)
        self.shared_expert = SwiGLU(c.hidden_size, c.shared_size)
        self.shared_expert_gate = nn.Linear(c.hidden_size, 1, bias=False)
        self.probabilities = torch.empty(0)
        self.chosen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        self.probabilities = self.gate(tokens)
        weight, self.chosen = self.probabilities.topk(self.top_k, dim=-1)
        routed = self.experts(tokens, self.chosen, weight / weight.sum(-1, keepdim=True))
        shared = self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
        return (routed + shared).view_as(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Mixing over time, then over experts, each with a norm before and a sum after."""

    def __init__(self, c: Config, index: int) -> None:
        super().__init__()
        self.is_linear = c.is_linear(index)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.input_layernorm = Norm(c.hidden_size, c.eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.eps)
        self.mlp = SparseMoe(c)

    def forward(self, x: Tensor) -> Tensor:
        mix = self.linear_attn if self.is_linear else self.self_attn
        x = x + mix(self.input_layernorm(x))
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class DemoModel(nn.Module):
    """Token ids to logits, embeddings and head tied."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.n_layers))
        self.norm = Norm(c.hidden_size, c.eps)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids `[batch, length]`, length a multiple of 64, to `[batch, length, hidden]`."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.hidden(ids), self.embed_tokens.weight)

    def moe_blocks(self) -> list[SparseMoe]:
        """The MoE block of each layer."""
        return [layer.mlp for layer in self.layers if isinstance(layer, Layer)]
