"""The gated delta rule over many tokens as one CUDA kernel: what mlx-lm has for Metal, for the other GPU.

In MLX operations even the chunked form (delta.py) costs some hundred launches for a thousand tokens of one layer, and
the host cannot launch them as fast as the device computes them. Here it is one. Knows the recurrence and one kernel;
nothing of models. Invariant: as `mlx_lm.models.gated_delta.gated_delta_ops`, in float32 but for the order of the sums
over a key's values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

LANES = 8  # threads that share one row of the state: 16 of its values each for keys of 128, and three shuffles a sum
THREADS = 128  # of a block
_SUMS = 4  # chains a sum is taken in, so that products need not wait for each other

# One thread has EACH values of one of the B x Hv x Dv rows of the state in registers, and steps through the tokens.
# What the next token needs is loaded before this one is computed.
_SOURCE = """
  struct alignas(ALIGN) Part { InT x[EACH]; };
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = thread / LANES, lane = thread % LANES;
  const int dv = row % DV, hv = row / DV % HV, hk = hv / (HV / HK);
  const int n = tokens[0];
  const size_t first = (size_t)(row / DV / HV) * n;  // token of this sequence
  const Part* const ks = (const Part*)(k + (first * HK + hk) * (LANES * EACH)) + lane;
  const Part* const qs = (const Part*)(q + (first * HK + hk) * (LANES * EACH)) + lane;
  const size_t head = first * HV + hv;

  float s[EACH];
  for (int i = 0; i < EACH; ++i) s[i] = state[(size_t)thread * EACH + i];

  Part key = ks[0], query = qs[0];
  float value = static_cast<float>(v[head * DV + dv]);
  float decay = static_cast<float>(g[head]), rate = static_cast<float>(beta[head]);
  for (int t = 0; t < n; ++t) {
    const size_t next = t + 1 < n ? t + 1 : t;
    const Part next_key = ks[next * (HK * LANES)], next_query = qs[next * (HK * LANES)];
    const float next_value = static_cast<float>(v[(head + next * HV) * DV + dv]);
    const float next_decay = static_cast<float>(g[head + next * HV]);
    const float next_rate = static_cast<float>(beta[head + next * HV]);

    float sum[SUMS] = {0};
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
      s[i] *= decay;
      sum[i % SUMS] += s[i] * static_cast<float>(key.x[i]);
    }
    float held = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int d = LANES / 2; d > 0; d /= 2) held += __shfl_xor_sync(0xffffffffu, held, d);

    const float change = (value - held) * rate;
    float out[SUMS] = {0};
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
      s[i] += change * static_cast<float>(key.x[i]);
      out[i % SUMS] += s[i] * static_cast<float>(query.x[i]);
    }
    float all = (out[0] + out[1]) + (out[2] + out[3]);
    for (int d = LANES / 2; d > 0; d /= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
    if (lane == 0) y[(head + (size_t)t * HV) * DV + dv] = static_cast<InT>(all);

    key = next_key;
    query = next_query;
    value = next_value;
    decay = next_decay;
    rate = next_rate;
  }
  for (int i = 0; i < EACH; ++i) state_out[(size_t)thread * EACH + i] = s[i];
"""


def fits(q: mx.array, v: mx.array) -> bool:
    """Whether the kernel takes these shapes.

    Args:
        q: `[B, T, Hk, Dk]`.
        v: `[B, T, Hv, Dv]`.
    """
    rows = v.shape[0] * v.shape[2] * v.shape[3]
    return q.shape[-1] % (LANES * _SUMS) == 0 and q.shape[-1] <= 32 * LANES and rows * LANES % THREADS == 0


def gated_delta_kernel(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Run the gated delta rule over T tokens on a CUDA device.

    Args:
        q, k: `[B, T, Hk, Dk]` of one dtype, keys normalised.
        v: `[B, T, Hv, Dv]`; Hv is a multiple of Hk.
        g: decay in [0, 1], `[B, T, Hv]`.
        beta: `[B, T, Hv]`.
        state: `[B, Hv, Dv, Dk]`.

    Returns:
        Lazy y `[B, T, Hv, Dv]` in q's dtype, and the float32 state after the last token.
    """
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[-2:]
    each = Dk // LANES
    y, state_out = _kernel()(
        inputs=[q, k.astype(q.dtype), v, g, beta, state.astype(mx.float32), mx.array([T], mx.int32)],
        template=[
            ("InT", q.dtype), ("ALIGN", math.gcd(16, each * q.itemsize)), ("EACH", each), ("LANES", LANES),
            ("SUMS", _SUMS), ("HK", Hk), ("HV", Hv), ("DV", Dv),
        ],
        grid=(B * Hv * Dv * LANES, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(B, T, Hv, Dv), (B, Hv, Dv, Dk)],
        output_dtypes=[q.dtype, mx.float32],
    )  # fmt: skip
    return y, state_out


@functools.cache
def _kernel() -> Callable[..., Any]:
    kernel: Any = mx.fast.cuda_kernel(
        name="gated_delta",
        input_names=["q", "k", "v", "g", "beta", "state", "tokens"],
        output_names=["y", "state_out"],
        source=_SOURCE,
    )
    return kernel  # type: ignore[no-any-return]
