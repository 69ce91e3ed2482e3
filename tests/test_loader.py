"""Loading: drop-in for mlx_lm.load, and every checkpoint that should be refused is, by name."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import batch_generate, generate, stream_generate
from mlx_lm.utils import load_model
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx import load
from swiftlet_mlx.errors import (
    BudgetTooSmall,
    CheckpointError,
    ConfigError,
    ModelNotFound,
    OptionError,
    RawCheckpoint,
    StreamingUnsupported,
    SwiftletError,
)
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.oracle import compare

IDS = mx.array([[1, 5, 9, 42, 7, 99, 3, 17]])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("load") / "model", kind="qwen3_5_moe", bits=4, tokenizer=True)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be spoilt."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def tensors(folder: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]


def save(folder: Path, weights: dict[str, mx.array], file: str = "model.safetensors") -> None:
    mx.eval(*weights.values())
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    mx.save_safetensors(str(folder / file), weights, metadata={"format": "mlx"})


def logits(folder: Path, **options: Any) -> mx.array:
    model, _ = load_streamed(folder, **options)
    out: mx.array = model(IDS)
    mx.eval(out)
    return out


def stock_logits(folder: Path) -> mx.array:
    out: mx.array = load_model(folder)[0](IDS)
    mx.eval(out)
    return out


def equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())


# ---- drop-in -----------------------------------------------------------------------------------------------------


def test_mlx_lm_functions_work_on_the_loaded_model(original: Path) -> None:
    import mlx_lm

    stock, stock_tokenizer = mlx_lm.load(str(original))
    model, tokenizer = load(original, cache_gb=0.001)
    prompt = "Hello there"
    expected = generate(stock, stock_tokenizer, prompt, max_tokens=12)
    assert generate(model, tokenizer, prompt, max_tokens=12) == expected
    assert "".join(r.text for r in stream_generate(model, tokenizer, prompt, max_tokens=12)) == expected
    prompts = [tokenizer.encode(text) for text in ("Hello", "a much longer prompt than that", "x")]
    ours = batch_generate(model, tokenizer, prompts, max_tokens=8).texts
    assert ours == batch_generate(stock, stock_tokenizer, prompts, max_tokens=8).texts


def test_perplexity_is_that_of_the_resident_model(original: Path) -> None:
    from mlx_lm.perplexity import eval_ppl

    data = mx.array(np.random.default_rng(0).integers(0, 100, (2, 24)))
    model, _ = load_streamed(original, cache_gb=0.001)
    assert eval_ppl(model, data, batch_size=2) == eval_ppl(load_model(original)[0], data, batch_size=2)


def test_a_model_loaded_on_one_thread_generates_on_another(original: Path) -> None:
    model, tokenizer = load(original, cache_gb=0.00005)
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(generate(model, tokenizer, "Hello there", max_tokens=12)))
    thread.start()
    thread.join()
    assert answers == [generate(model, tokenizer, "Hello there", max_tokens=12)]


def test_return_config_gives_the_third_item(original: Path) -> None:
    assert load(original, return_config=True)[2]["model_type"] == "qwen3_5_moe"


@pytest.mark.long
def test_unmodified_mlx_lm_runs_a_container(original: Path, tmp_path: Path) -> None:
    container = tmp_path / "model.qpack"
    repack_checkpoint(original, container)
    command = [sys.executable, "-m", "mlx_lm", "generate", "--prompt", "Hello", "--max-tokens", "8", "--temp", "0"]
    outputs = [
        subprocess.run([*command, "--model", str(path), *extra], capture_output=True, text=True, check=True).stdout
        for path, extra in ((original, []), (container, ["--trust-remote-code"]))
    ]
    answers = [text.split("==========")[1] for text in outputs]
    assert answers[0] == answers[1]


def test_pools_are_no_parameters_of_the_model(original: Path) -> None:
    from mlx.utils import tree_flatten

    model, _ = load_streamed(original)
    names = [name for name, _ in tree_flatten(model.parameters())]
    assert names
    assert not [name for name in names if "switch_mlp" in name]


# ---- memory ------------------------------------------------------------------------------------------------------


def test_the_pool_costs_no_byte_more_than_the_budget(original: Path) -> None:
    for gb in (0.00002, 0.00005, 0.0001):
        model, _ = load_streamed(original, cache_gb=gb)
        arrays = [a for pool in model.pools.layers.values() for a in pool.arrays.values()]
        assert sum(a.nbytes for a in arrays) == model.pools.nbytes <= gb * 1e9


def test_a_budget_below_the_minimum_is_refused_with_the_minimum_named(original: Path) -> None:
    with pytest.raises(BudgetTooSmall, match=r"the minimum for this model is --cache-gb ([0-9.]+)") as caught:
        load_streamed(original, cache_gb=1e-6)
    minimum = float(str(caught.value).split("--cache-gb ")[1].split(",")[0])
    load_streamed(original, cache_gb=minimum)  # and the named one works


@pytest.mark.parametrize("gb", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_budget_is_refused(original: Path, gb: float) -> None:
    with pytest.raises(OptionError, match="--cache-gb"):
        load_streamed(original, cache_gb=gb)


def test_a_pool_below_one_tokens_experts_is_warned_about_with_numbers(original: Path) -> None:
    said: list[str] = []
    load_streamed(original, cache_gb=0.00002, warn=said.append)
    assert any("one token uses 8" in text for text in said), said


@pytest.mark.long
def test_twenty_loads_leave_no_file_thread_or_memory_behind(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", kind="qwen3_moe", shape={"layers": 1})
    fds = Path("/proc/self/fd")

    def held() -> tuple[int, int]:
        gc.collect()
        return len(list(fds.iterdir())) if fds.is_dir() else 0, mx.get_active_memory()

    before, threads = held(), set(threading.enumerate())
    for n in range(20):
        model, _ = load_streamed(folder, cache_gb=0.00006)
        mx.eval(model(mx.array([[1, 2]])), model(mx.array([[3]])))
        started = set(threading.enumerate()) - threads
        assert started, "its misses are read by threads"
        if n % 2:
            model.pools.close()
        del model
        assert held() == before
        for thread in started:
            thread.join(5)
        assert set(threading.enumerate()) <= threads


def test_a_load_that_fails_leaves_no_file_open(folder: Path) -> None:
    fds = Path("/proc/self/fd")
    if not fds.is_dir():
        pytest.skip("the system does not list a process's open files")
    for gb, hidden in ((1e-9, 64), (None, 96)):
        change_config(folder, lambda config, hidden=hidden: config["text_config"].update(hidden_size=hidden))  # type: ignore[misc]
        with pytest.raises((BudgetTooSmall, StreamingUnsupported)) as caught:
            load_streamed(folder, cache_gb=gb)
        del caught
        gc.collect()
        still_open = [str(file) for fd in fds.iterdir() if (file := fd.resolve()).is_relative_to(folder.resolve())]
        assert not still_open


# ---- checkpoints that do not say what they must --------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["num_local_experts", "n_routed_experts", "num_experts"])
def test_the_expert_count_is_found_under_any_spelling(folder: Path, spelling: str) -> None:
    expected = stock_logits(folder)

    def respell(config: dict[str, Any]) -> None:
        config[spelling] = config["text_config"]["num_experts"]

    change_config(folder, respell)
    assert equal(logits(folder), expected)


def test_a_dense_model_is_refused_and_never_loaded_in_full(folder: Path) -> None:
    save(folder, {k: v for k, v in tensors(folder).items() if "switch_mlp" not in k})
    with pytest.raises(StreamingUnsupported, match="no routed experts"):
        load_streamed(folder)


def test_mtp_tensors_do_not_make_a_checkpoint_raw(folder: Path) -> None:
    expected = stock_logits(folder)
    weights = tensors(folder)
    weights |= {"mtp.norm.weight": mx.ones(64), "mtp.layers.0.input_layernorm.weight": mx.ones(64)}
    save(folder, weights)
    assert equal(logits(folder), expected)


def test_a_raw_convolution_is_refused_with_the_command_that_converts(folder: Path) -> None:
    weights = {k: v.moveaxis(2, 1) if "conv1d" in k else v for k, v in tensors(folder).items()}
    save(folder, weights)
    with pytest.raises(RawCheckpoint, match=r"mlx_lm\.convert --hf-path"):
        load_streamed(folder)


def test_tied_only_at_the_top_level_loads_tied(folder: Path) -> None:
    weights = {k: v for k, v in tensors(folder).items() if "lm_head" not in k}
    save(folder, weights)

    def tie(config: dict[str, Any]) -> None:
        config["text_config"]["tie_word_embeddings"] = True

    def only_at_the_top(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"].pop("tie_word_embeddings")

    change_config(folder, tie)
    expected = stock_logits(folder)
    change_config(folder, only_at_the_top)
    assert equal(logits(folder), expected)


def test_a_missing_head_is_refused_naming_both_places(folder: Path) -> None:
    save(folder, {k: v for k, v in tensors(folder).items() if "lm_head" not in k})
    with pytest.raises(ConfigError, match=r"lm_head.*text_config"):
        load_streamed(folder)


def test_overrides_under_any_prefix_are_understood_and_lies_refused(folder: Path) -> None:
    expected = stock_logits(folder)
    bits = {"group_size": 32, "bits": 4}
    for path in ("language_model.model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate"):
        found = {"group_size": 64, "bits": 8}
        change_config(folder, lambda c, p=path, f=found: c["quantization"].update({p: f}))  # type: ignore[misc]
    assert equal(logits(folder), expected)
    change_config(folder, lambda c: c["quantization"].update({"language_model.lm_head": {**bits, "bits": 8}}))
    with pytest.raises(ConfigError, match=r"8 bits .* for language_model.lm_head, its tensors have 4"):
        load_streamed(folder)


def test_a_stray_shard_is_ignored_with_a_warning(folder: Path) -> None:
    expected = stock_logits(folder)
    index = {"weight_map": dict.fromkeys(tensors(folder), "model.safetensors")}
    save(folder, {"language_model.lm_head.weight": mx.zeros((4, 4))}, "model-extra.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    said: list[str] = []
    assert equal(logits(folder, warn=said.append), expected)
    assert any("model-extra.safetensors" in text for text in said)


def test_a_shard_that_the_index_names_is_missed_by_name(folder: Path) -> None:
    index = {"weight_map": {**dict.fromkeys(tensors(folder), "model.safetensors"), "x": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors"):
        load_streamed(folder)


def test_a_tensor_in_two_files_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    shutil.copy(folder / "model.safetensors", folder / "model-copy.safetensors")
    with pytest.raises(CheckpointError, match="is in both"):
        load_streamed(folder)


def test_a_truncated_generation_config_is_reported_by_name(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, ')
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(folder)


def test_a_folder_without_tokenizer_says_what_to_do(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelNotFound, match="--ids"):
        load(folder)


@pytest.mark.parametrize("value", [0, -1, "x", None, 1 << 62])
@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size", "vocab_size", "num_key_value_heads"])
def test_an_impossible_number_in_the_config_is_an_error_of_ours(folder: Path, key: str, value: Any) -> None:
    change_config(folder, lambda config: config["text_config"].update({key: value}))
    with pytest.raises(SwiftletError, match="model"):
        load_streamed(folder)


def test_a_tokenizer_that_is_none_is_an_error_of_ours(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a": ')
    with pytest.raises(ConfigError, match=r"the tokenizer cannot be loaded .* Copy tokenizer\.json"):
        load(folder)


def test_the_oracle_refuses_what_stock_mlx_lm_cannot_load(folder: Path, tmp_path: Path) -> None:
    container = tmp_path / "model.qpack"
    repack_checkpoint(folder, container)
    with pytest.raises(OptionError, match="is a container; --source is"):
        compare(container, container, [1, 2, 3])
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match="is not there"):
        compare(container, folder, [1, 2, 3])


def test_code_in_a_model_folder_is_run_only_when_told_to(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nfrom mlx_lm.models.qwen3_5_moe import Model, ModelArgs\n"
    (folder / "custom.py").write_text(code)
    change_config(folder, lambda config: config.update(model_file="custom.py"))
    load_streamed(folder)
    assert not ran.exists()
    load_streamed(folder, trust_remote_code=True)
    assert ran.exists()


def test_an_unknown_model_type_is_an_error_of_ours(folder: Path) -> None:
    change_config(folder, lambda config: config.update(model_type="nonesuch"))
    with pytest.raises(StreamingUnsupported, match="nonesuch"):
        load_streamed(folder)


def test_a_name_that_is_no_folder_says_how_to_install() -> None:
    with pytest.raises(ModelNotFound, match="swiftlet-mlx repack --from-hf"):
        load("no/such-model")


@pytest.mark.long
def test_load_stays_a_function_whatever_was_imported_before() -> None:
    program = "import swiftlet_mlx.loader; from swiftlet_mlx import load; assert callable(load)"
    subprocess.run([sys.executable, "-c", program], check=True)
