"""The chunked gated delta rule against mlx-lm's op loop and against a float64 recurrence."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, qwen3_5_moe, qwen3_next
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk

from swiftlet_mlx import delta

Inputs = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


def make(t: int, *, b: int = 1, hk: int = 2, hv: int = 4, dk: int = 32, dv: int = 16, seed: int = 0) -> Inputs:
    key = mx.random.split(mx.random.key(seed), 5)
    q, k = normalize_qk(
        mx.random.normal((b, t, hk, dk), key=key[0]),
        mx.random.normal((b, t, hk, dk), key=key[1]),
        inv_scale=dk**-0.5,
        eps=1e-6,
    )
    v = mx.random.normal((b, t, hv, dv), key=key[2])
    g = mx.exp(-3 * mx.random.uniform(shape=(b, t, hv), key=key[3]))
    beta = mx.sigmoid(mx.random.normal((b, t, hv), key=key[4]))
    return q, k, v, g, beta


def exact(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence token by token in float64."""
    q, k, v, g, beta = (np.array(x.astype(mx.float32), dtype=np.float64) for x in (q, k, v, g, beta))
    b, t, hv, dv = v.shape
    q, k = (np.repeat(x, hv // x.shape[2], axis=2) for x in (q, k))
    s = np.zeros((b, hv, dv, k.shape[-1])) if state is None else np.array(state, dtype=np.float64)
    y = np.zeros_like(v)
    for i in range(t):
        s = s * g[:, i, :, None, None]
        d = beta[:, i, :, None] * (v[:, i] - np.einsum("bhvk,bhk->bhv", s, k[:, i]))
        s = s + d[..., None] * k[:, i, :, None, :]
        y[:, i] = np.einsum("bhvk,bhk->bhv", s, q[:, i])
    return y, s


def gap(a: Any, b: Any) -> float:
    return float(np.abs(np.array(a, dtype=np.float64) - np.array(b, dtype=np.float64)).max())


@pytest.mark.parametrize("t", [32, 63, 64, 65, 127, 200])
def test_chunked_equals_the_loop_at_any_length(t: int) -> None:
    x = make(t)
    y, s = delta.gated_delta_chunked(*x)
    y0, s0 = gated_delta_ops(*x)
    assert (y.shape, s.shape) == (y0.shape, s0.shape)
    assert gap(y, y0) < 2e-6  # a few float32 roundings of numbers about 1
    assert gap(s, s0) < 2e-6


@pytest.mark.parametrize(("hk", "hv"), [(1, 1), (2, 2), (1, 4), (3, 6)])
def test_key_heads_are_shared_as_the_loop_shares_them(hk: int, hv: int) -> None:
    x = make(70, b=2, hk=hk, hv=hv)
    y, s = delta.gated_delta_chunked(*x)
    y0, s0 = gated_delta_ops(*x)
    assert gap(y, y0) < 2e-6
    assert gap(s, s0) < 2e-6


@pytest.mark.parametrize("cuts", [(50,), (1, 64, 65), (100, 133)])
def test_a_prompt_in_pieces_ends_in_the_same_state(cuts: tuple[int, ...]) -> None:
    x = make(180)
    whole_y, whole_s = delta.gated_delta_chunked(*x)
    state, ys = None, []
    for lo, hi in zip((0, *cuts), (*cuts, 180), strict=True):
        y, state = delta.gated_delta_chunked(*(a[:, lo:hi] for a in x), state=state)
        ys.append(y)
    assert gap(mx.concatenate(ys, axis=1), whole_y) < 2e-6
    assert gap(state, whole_s) < 2e-6


def test_padding_masked_out_on_either_side_leaves_state_and_real_tokens_alone() -> None:
    x = make(150, b=3)
    at = mx.arange(150)[None]
    mask = mx.concatenate([at >= 40, at < 90, at >= 0])
    state = mx.random.normal((3, 4, 16, 32), key=mx.random.key(9))
    y, s = delta.gated_delta_chunked(*x, state=state, mask=mask)
    y0, s0 = gated_delta_ops(*x, state, mask)
    assert gap(s, s0) < 2e-6
    keep = np.array(mask)
    assert gap(np.array(y)[keep], np.array(y0)[keep]) < 2e-6
    assert np.isfinite(np.array(y)).all()
    alone, _ = delta.gated_delta_chunked(*(a[1:2, :90] for a in x), state=state[1:2])
    assert gap(y[1:2, :90], alone) < 2e-6


def test_a_fully_masked_row_keeps_its_state_to_the_bit() -> None:
    x = make(64)
    state = mx.random.normal((1, 4, 16, 32), key=mx.random.key(9))
    _, s = delta.gated_delta_chunked(*x, state=state, mask=mx.zeros((1, 64), dtype=mx.bool_))
    assert np.array_equal(np.array(s), np.array(state))


DECAYS = {
    "zero everywhere": lambda g: mx.zeros_like(g),
    "zero at one token": lambda g: mx.where(mx.arange(g.shape[1])[:, None] == 70, 0, g),
    "denormal": lambda g: mx.full(g.shape, 1e-42),
    "strong then weak": lambda g: mx.where(mx.arange(g.shape[1])[:, None] % 7 == 0, 1e-38, 0.999 * mx.ones_like(g)),
    "none": lambda g: mx.ones_like(g),
    "exp(-100) a token": lambda g: mx.full(g.shape, 3.7e-44),
}


@pytest.mark.parametrize("name", DECAYS)
def test_extreme_decay_neither_overflows_nor_loses_digits(name: str) -> None:
    q, k, v, g, beta = make(150)
    g = DECAYS[name](g)
    state = 100 * mx.random.normal((1, 4, 16, 32), key=mx.random.key(9))
    y, s = delta.gated_delta_chunked(q, k, v, g, beta, state)
    y0, s0 = exact(q, k, v, g, beta, state)
    assert np.isfinite(np.array(y)).all()
    assert np.isfinite(np.array(s)).all()
    yl, sl = gated_delta_ops(q, k, v, g, beta, state)
    # No worse than a few times the loop's own distance from float64.
    assert gap(y, y0) <= 4 * gap(yl, y0) + 2e-6
    assert gap(s, s0) <= 4 * gap(sl, s0) + 2e-6


@pytest.mark.parametrize("top", [1.0, 2.0])
@pytest.mark.parametrize("keys", ["random", "equal", "two in turn"])
def test_the_triangular_solve_keeps_its_digits(keys: str, top: float) -> None:
    # One repeated token gives equal keys: powers of the matrix then reach 1e17 though its inverse is 0, 1
    # and -1.
    q, k, v, g, beta = make(192)
    if keys != "random":
        k = mx.take(k, mx.arange(192) % (1 if keys == "equal" else 2), axis=1)
    g, beta = mx.ones_like(g), mx.full(beta.shape, top)
    y, s = delta.gated_delta_chunked(q, k, v, g, beta)
    y0, s0 = exact(q, k, v, g, beta)
    yl, sl = gated_delta_ops(q, k, v, g, beta)
    # beta = 2 without decay is a product of reflections: nothing dies out, rounding adds up over 192 tokens.
    slack = 1e-5 if top == 1 else 1e-4
    assert gap(y, y0) <= 16 * gap(yl, y0) + slack
    assert gap(s, s0) <= 16 * gap(sl, s0) + slack


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_unit_lower_inverse_equals_float64(scale: float) -> None:
    rng = np.random.default_rng(3)
    k = rng.standard_normal((5, 64, 32))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    a = np.tril(k @ k.swapaxes(-1, -2), -1) * scale
    a[0] = np.tril(np.ones((64, 64)), -1) * scale
    got = np.array(delta._unit_lower_inverse(mx.array(a.astype(np.float32))))
    want = np.linalg.inv(np.eye(64) + a)
    assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()
    assert np.array_equal(np.triu(got, 1), np.zeros_like(got))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_dtypes_come_out_as_the_loop_returns_them(dtype: mx.Dtype) -> None:
    q, k, v, g, beta = make(64)
    x = (q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta.astype(dtype))
    y, s = delta.gated_delta_chunked(*x)
    y0, s0 = gated_delta_ops(*x)
    assert (y.dtype, s.dtype) == (y0.dtype, s0.dtype) == (dtype, mx.float32)
    assert gap(s, s0) < 2e-6
    assert gap(y.astype(mx.float32), y0.astype(mx.float32)) <= float(mx.finfo(dtype).eps)


def test_few_tokens_and_vector_gates_are_the_loop_to_the_bit() -> None:
    for t in (1, 2, delta.MIN_TOKENS - 1):
        x = make(t)
        for a, b in zip(delta.gated_delta_chunked(*x), gated_delta_ops(*x), strict=True):
            assert np.array_equal(np.array(a), np.array(b))
    q, k, v, g, beta = make(70)
    vector = mx.repeat(g[..., None], 32, axis=-1)
    for a, b in zip(
        delta.gated_delta_chunked(q, k, v, vector, beta), gated_delta_ops(q, k, v, vector, beta), strict=True
    ):
        assert np.array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize("masked", [False, True])
def test_on_cuda_a_prompt_goes_to_the_kernel_with_masked_tokens_doing_nothing(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[mx.array, ...]] = []

    def kernel(*x: mx.array) -> tuple[mx.array, mx.array]:
        calls.append(x)
        return gated_delta_ops(*x)

    monkeypatch.setattr(delta, "backend", lambda: "cuda")
    monkeypatch.setattr(delta, "gated_delta_kernel", kernel)
    x = make(40, b=2)
    mask = mx.arange(40)[None] < mx.array([[40], [33]]) if masked else None
    y, s = delta.gated_delta_prompt(*x, mask=mask)
    y0, s0 = gated_delta_ops(*x, None, mask)
    assert len(calls) == 1
    assert gap(s, s0) < 2e-6
    assert gap(y[0], y0[0]) < 2e-6
    vector = mx.repeat(x[3][..., None], 32, axis=-1)
    for other in (make(delta.MIN_TOKENS - 1), make(40, dk=48), make(40, dv=6, hv=1, hk=1), (*x[:3], vector, x[4])):
        for a, b in zip(delta.gated_delta_prompt(*other), delta.gated_delta_chunked(*other), strict=True):
            assert np.array_equal(np.array(a), np.array(b)), "what the kernel does not take"
    assert len(calls) == 1


@pytest.mark.skipif(delta.backend() != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("t", [1, 33, 200])
def test_the_kernel_equals_the_loop(t: int, dtype: mx.Dtype) -> None:
    q, k, v, g, beta = make(t, b=2, dk=128, dv=64)
    x = (q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta.astype(dtype))
    state = mx.random.normal((2, 4, 64, 128), key=mx.random.key(9))
    y, s = delta.gated_delta_kernel(*x, state)
    y0, s0 = gated_delta_ops(*x, state)
    assert (y.dtype, s.dtype) == (dtype, mx.float32)
    assert gap(s, s0) < 1e-5
    assert gap(y.astype(mx.float32), y0.astype(mx.float32)) < (1e-5 if dtype == mx.float32 else 0.02)


TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "mlp_only_layers": [],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 4096,
}


def tiny(kind: str) -> Any:
    mx.random.seed(11)
    module = {"qwen3_next": qwen3_next, "qwen3_5_moe": qwen3_5_moe}[kind]
    args = module.ModelArgs.from_dict({"model_type": kind, **TEXT})
    model = module.Model(args)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])
def test_only_the_given_model_runs_in_chunks_and_it_can_be_undone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny(kind), tiny(kind)
    ids = (mx.arange(100) * 7 % 96)[None]
    before = np.array(model(ids))

    calls: list[int] = []
    real = delta.gated_delta_chunked

    def counted(q: mx.array, *rest: Any) -> tuple[mx.array, mx.array]:
        calls.append(q.shape[1])
        return real(q, *rest)

    monkeypatch.setattr(delta, "gated_delta_chunked", counted)
    delta._chunked_class.cache_clear()
    stock_class = type(model.layers[0].linear_attn)
    assert delta.use_chunked_delta(model) == 3
    assert delta.use_chunked_delta(model) == 0  # already done
    assert isinstance(model.layers[0].linear_attn, stock_class)

    chunked = np.array(model(ids))
    assert calls == [100, 100, 100]
    assert not np.array_equal(chunked, before), "it sums in another order: equality means it never ran"
    assert np.abs(chunked - before).max() < 1e-4
    assert np.array_equal(np.array(other(ids)), before)
    assert calls == [100, 100, 100], "a stock model in the same process must stay stock"

    assert delta.use_stock_delta(model) == 3
    assert np.array_equal(np.array(model(ids)), before)
    assert type(model.layers[0].linear_attn) is stock_class
    delta._chunked_class.cache_clear()


def test_parameters_and_decoding_are_untouched_by_the_change_of_class() -> None:
    model = tiny("qwen3_next")
    cache0, cache1 = model.make_cache(), model.make_cache()
    ids = (mx.arange(20) * 5 % 96)[None]
    want = [np.array(model(ids, cache0))] + [np.array(model(ids[:, i : i + 1], cache0)) for i in range(5)]
    names = [n for n, _ in model.named_modules()]
    delta.use_chunked_delta(model)
    assert [n for n, _ in model.named_modules()] == names
    got = [np.array(model(ids, cache1))] + [np.array(model(ids[:, i : i + 1], cache1)) for i in range(5)]
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)


def test_mlx_lm_still_has_the_names_this_stands_on() -> None:
    # gated_delta_update must look the loop up by name, and the layers gated_delta_update.
    assert "gated_delta_ops" in gated_delta.gated_delta_update.__code__.co_names
    for kind in ("qwen3_next", "qwen3_5_moe"):
        layer = type(tiny(kind).layers[0].linear_attn)
        assert "gated_delta_update" in layer.__call__.__code__.co_names


def test_the_cpu_keeps_the_loop_by_default() -> None:
    if mx.default_device() == mx.Device(mx.gpu):
        pytest.skip("this machine computes on a GPU")
    assert not delta.chunked_by_default()
