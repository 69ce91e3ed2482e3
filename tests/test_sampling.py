"""Tokens are drawn as the options say, from the reply's own key, and nothing out of range gets that far."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from swiftlet_mlx.defaults import INSTRUCT, THINKING, read_json, sampling_defaults, stated_ends
from swiftlet_mlx.errors import ConfigError, SamplingError
from swiftlet_mlx.sampling import Sampler, Sampling, best

V = 40
LOGITS = mx.random.normal((V,), key=mx.random.key(7)) * 3
DRAWS = 400


def draws(n: int = DRAWS, logits: mx.array = LOGITS, eos: tuple[int, ...] = (), **options: Any) -> list[int]:
    sampler = Sampler(Sampling(**options), V, eos)
    return [int(sampler.draw(logits).item()) for _ in range(n)]  # type: ignore[arg-type]


def allowed(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> dict[int, float]:
    """Which tokens may come and how likely they are among all, worked out plainly."""
    scores = np.array(LOGITS.tolist()) / temperature
    order = list(np.argsort(-scores))[: top_k or V]
    p = np.exp(scores[order] - scores[order].max())
    p /= p.sum()
    kept, mass = [], 0.0
    for token, share in zip(order, p, strict=True):
        if mass < top_p:
            kept.append((token, share))
        mass += share
    return {int(t): float(share) for t, share in kept if share >= min_p * kept[0][1]}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 3.0, "top_k": 12, "top_p": 0.7, "min_p": 0.1},
        {"temperature": 2.0, "top_k": V, "top_p": 0.9},
        {"temperature": 0.5, "top_k": 1000},
        {"temperature": 1.0, "top_p": 1e-9},
    ],
)
def test_exactly_the_tokens_the_filters_let_through_come(options: dict[str, Any]) -> None:
    may = allowed(**options)
    seen = set(draws(seed=3, **options))
    assert seen <= set(may)
    assert {token for token, share in may.items() if share > 0.03} <= seen


@pytest.mark.parametrize("n", [7, 512 * 12, 512 * 12 + 1, 9_999])
@pytest.mark.parametrize("values", ["apart", "tied", "impossible"])
def test_the_best_are_found_without_sorting_all(n: int, values: str) -> None:
    scores = mx.random.normal((n,), key=mx.random.key(n))
    if values == "tied":
        scores = mx.round(scores)
    elif values == "impossible":
        scores = mx.where(mx.arange(n) % 600 == 3, scores, -math.inf)
    plain = np.array(scores.tolist())
    for k in (1, 3):
        found = best(scores, k).tolist()
        assert len(set(found)) == k
        assert plain[found].tolist() == sorted(plain.tolist(), reverse=True)[:k]


def test_a_draw_reads_nothing_back() -> None:
    """In a function that is being vectorised, any look at a number raises."""
    options = Sampling(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, seed=3, presence_penalty=1.0, min_tokens=9,
                       repetition_penalty=1.1, logit_bias={3: 1.0})  # fmt: skip
    logits = mx.random.normal((7000,), key=mx.random.key(7))
    plain, looked_at = Sampler(options, 7000, (5,)), Sampler(options, 7000, (5,))
    with pytest.raises(ValueError, match="not allowed"):
        mx.vmap(lambda row: mx.array(int(row.sum())))(logits[None])
    two = [plain.draw(logits).item(), plain.draw(logits).item()]  # the second one is penalised
    assert mx.vmap(lambda row: mx.stack([looked_at.draw(row), looked_at.draw(row)]))(logits[None]).tolist() == [two]


def test_a_large_vocabulary_is_sampled_as_a_plain_sort_would() -> None:
    """Same key, same candidates in the same order: the same tokens as by sorting all of it."""
    logits = mx.random.normal((30_000,), key=mx.random.key(1)) * 3
    sampler = Sampler(Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=4), 30_000)
    key, order = mx.random.key(4), mx.argsort(-logits)[:5]
    scores = logits[order]
    scores = (scores - scores[0]) * (1.0 / 0.8)
    p = mx.softmax(scores)
    scores = mx.where((mx.cumsum(p) - p < 0.9) & (scores >= math.log(0.05)), scores, -math.inf)
    for _ in range(20):
        key, own = mx.random.split(key)
        assert sampler.draw(logits).item() == order[mx.random.categorical(scores, key=own)].item()


def test_frequencies_follow_the_probabilities() -> None:
    p = np.array(mx.softmax(LOGITS / 1.5).tolist())
    found = Counter(draws(3000, temperature=1.5, seed=11))
    # Three standard deviations of a binomial share.
    for token in range(V):
        assert abs(found[token] / 3000 - p[token]) < 3.5 * math.sqrt(p[token] * (1 - p[token]) / 3000) + 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_zero_temperature_takes_the_best_token(temperature: float) -> None:
    assert set(draws(5, temperature=temperature)) == {int(mx.argmax(LOGITS).item())}  # type: ignore[arg-type]


def test_a_seed_gives_the_same_tokens_whatever_else_is_drawn() -> None:
    one = draws(40, temperature=5.0, seed=5)
    mx.random.seed(1)
    mx.random.normal((9,))
    assert draws(40, temperature=5.0, seed=5) == one
    assert draws(40, temperature=5.0, seed=6) != one
    assert draws(40, temperature=5.0, seed=2**64 - 1) == draws(40, temperature=5.0, seed=2**64 - 1)


def test_drawing_leaves_the_global_random_state_alone() -> None:
    mx.random.seed(3)
    expected = mx.random.normal((4,)).tolist()
    mx.random.seed(3)
    draws(3, temperature=1.0)
    assert mx.random.normal((4,)).tolist() == expected


def test_without_a_seed_two_replies_differ() -> None:
    assert draws(40, temperature=5.0) != draws(40, temperature=5.0)


# ---- penalties: on what the reply holds, and on nothing else -----------------------------------------------------


def adjusted(said: list[int], **options: Any) -> np.ndarray[Any, Any]:
    sampler = Sampler(Sampling(**options), V)
    for token in said:
        forced = mx.full((V,), -1e9)
        forced[token] = 1e9
        assert sampler.draw(forced).item() == token
    return np.array(sampler._adjusted(LOGITS).tolist())


def test_presence_and_frequency_penalties_count_the_whole_reply() -> None:
    said = [3] * 50 + [4]
    plain, found = np.array(LOGITS.tolist()), adjusted(said, presence_penalty=0.5, frequency_penalty=0.25)
    assert found[3] == pytest.approx(plain[3] - 0.5 - 0.25 * 50, abs=1e-4)
    assert found[4] == pytest.approx(plain[4] - 0.75, abs=1e-5)
    others = [t for t in range(V) if t not in (3, 4)]
    assert (found[others] == plain[others]).all()


def test_the_repetition_penalty_weakens_either_sign() -> None:
    plain = np.array(LOGITS.tolist())
    high, low = int(plain.argmax()), int(plain.argmin())
    found = adjusted([high, low], repetition_penalty=2.0)
    assert found[high] == pytest.approx(plain[high] / 2)
    assert found[low] == pytest.approx(plain[low] * 2)
    assert np.count_nonzero(found != plain) == 2


def test_penalties_stop_a_loop() -> None:
    assert len(set(draws(8, presence_penalty=2.0, frequency_penalty=2.0))) > 1
    assert len(set(draws(8))) == 1


def test_a_logit_bias_moves_its_token_only() -> None:
    assert set(draws(3, logit_bias={11: 100.0})) == {11}
    assert int(mx.argmax(LOGITS).item()) not in draws(9, logit_bias={int(mx.argmax(LOGITS).item()): -100.0})  # type: ignore[arg-type]


def test_end_tokens_are_held_back_until_the_minimum() -> None:
    best = int(mx.argmax(LOGITS).item())  # type: ignore[arg-type]
    found = draws(6, eos=(best, 10**9), min_tokens=3)
    assert best not in found[:3]
    assert found[3:] == [best] * 3


def test_where_a_constraint_leaves_only_the_end_it_may_come() -> None:
    only_end = mx.where(mx.arange(V) == 7, 0.0, -math.inf)
    assert draws(2, logits=only_end, eos=(7,), min_tokens=9) == [7, 7]
    assert draws(2, logits=only_end, eos=(7,), min_tokens=9, temperature=1.0, top_k=5) == [7, 7]


# ---- ranges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 5.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", "hot"), ("temperature", True), ("top_p", 0.0), ("top_p", 1.01), ("top_k", -1),
        ("top_k", 2.5), ("min_p", -0.1), ("min_p", 1.1), ("seed", -1), ("seed", 2**64), ("seed", 1.0),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3), ("repetition_penalty", 0.0),
        ("repetition_penalty", 11), ("min_tokens", -1), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {"1": 1.0}), ("logit_bias", [1]),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=name) as caught:
        Sampling(**{name: value})
    assert caught.value.param == name


def test_a_bias_on_an_id_the_model_lacks_is_refused() -> None:
    with pytest.raises(SamplingError, match=f"token {V}"):
        Sampler(Sampling(logit_bias={V: 1.0}), V)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(SamplingError, match="'temperatur'"):
        Sampling().with_values(temperatur=1.0)


def test_none_leaves_a_value_as_it_is() -> None:
    assert Sampling(top_k=5).with_values(top_k=None, temperature=0.5) == Sampling(top_k=5, temperature=0.5)


# ---- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [({"eos_token_id": 7}, {}, {7}), ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {7, 8, 9}), ({}, {}, set()),
     ({"eos_token_id": None, "text_config": {"eos_token_id": 5}}, {"eos_token_id": True}, {5}),
     ({"text_config": 3, "eos_token_id": ["x", -1, 4]}, {}, {4})],
)  # fmt: skip
def test_ends_are_the_union_of_what_the_files_state(config: Any, generation: Any, ends: set[int]) -> None:
    assert stated_ends(config, generation) == ends


# ---- defaults ----------------------------------------------------------------------------------------------------


def test_the_model_s_own_file_comes_first() -> None:
    config = {"temperature": 0.9, "top_k": 33, "top_p": None, "eos_token_id": [1]}
    assert sampling_defaults(config, thinking=True) == Sampling(temperature=0.9, top_k=33)


def test_without_a_file_qwen_s_recommendations_hold() -> None:
    assert sampling_defaults({}, thinking=True) == THINKING
    assert sampling_defaults({"repetition_penalty": 1.05}, thinking=False) == INSTRUCT.with_values(
        repetition_penalty=1.05
    )


def test_a_file_that_says_not_to_sample_is_greedy() -> None:
    assert sampling_defaults({"do_sample": False, "temperature": 0.9}, thinking=True).temperature == 0.0


def test_an_impossible_default_is_reported_with_its_file() -> None:
    with pytest.raises(ConfigError, match=r"here\.json: top_p is 7"):
        sampling_defaults({"top_p": 7}, thinking=True, source="here.json")


def test_a_truncated_file_is_reported_by_name_and_a_missing_one_is_empty(tmp_path: Any) -> None:
    assert read_json(tmp_path / "generation_config.json") == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1,')
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        read_json(tmp_path / "generation_config.json")
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no JSON object"):
        read_json(tmp_path / "generation_config.json")
