"""A checkpoint folder is opened only whole, unambiguous and in MLX layout, whatever lies beside its shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx.checkpoint import INDEX, checkpoint_from_headers, is_mtp, is_vision, open_checkpoint
from swiftlet_mlx.config import ModelConfig, read_config
from swiftlet_mlx.errors import CheckpointError, ConfigError, SafetensorsError, StreamingUnsupported, SwiftletError
from swiftlet_mlx.safetensors import build_header, parse_header, tensor_bytes

SHARDS = ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", bits=4, shards=3)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def put(folder: Path, file: str, tensors: dict[str, tuple[int, ...]]) -> None:
    parts = [(name, "F32", shape) for name, shape in tensors.items()]
    data = bytes(sum(tensor_bytes(dtype, shape) for _, dtype, shape in parts))
    (folder / file).write_bytes(build_header(parts) + data)


# ---- which files ---------------------------------------------------------------------------------------------------


def test_every_tensor_is_found_once_where_the_index_says(folder: Path) -> None:
    opened = open_checkpoint(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {name: at.file for name, at in opened.dense.items()}
    found |= {
        f"model.layers.{n}.mlp.switch_mlp.{section}": at.file
        for n, parts in opened.experts.items()
        for section, at in parts.items()
    }
    assert found == weight_map
    assert opened.files == SHARDS
    assert sorted(opened.tables) == [0, 1, 2, 3]
    assert opened.warnings == ()


def test_a_stray_shard_is_ignored_with_a_warning(folder: Path) -> None:
    expected = open_checkpoint(folder).dense
    put(folder, "model-lm_head.safetensors", {"lm_head.weight": (128, 64)})
    opened = open_checkpoint(folder)
    assert opened.dense == expected
    assert any("model-lm_head.safetensors" in text and "ignored" in text for text in opened.warnings)


@pytest.mark.parametrize("index", [True, False])
def test_an_absent_shard_is_refused(folder: Path, index: bool) -> None:
    (folder / SHARDS[1]).unlink()
    if not index:
        (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match="00002" if index else r"shards 2 of 3 are missing"):
        open_checkpoint(folder)


def test_the_last_shard_is_missed_by_the_numbers_of_the_others(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SHARDS[2]).unlink()
    with pytest.raises(CheckpointError, match="shards 3 of 3"):
        open_checkpoint(folder)


def test_an_index_of_other_tensors_is_refused(folder: Path) -> None:
    edit(folder / INDEX, lambda v: v["weight_map"].update({"model.layers.0.old.weight": SHARDS[0]}))
    with pytest.raises(CheckpointError, match=r"promises model\.layers\.0\.old\.weight"):
        open_checkpoint(folder)


def test_an_index_with_moved_tensors_is_used_with_a_warning(folder: Path) -> None:
    expected = open_checkpoint(folder)
    edit(folder / INDEX, lambda v: v["weight_map"].update(dict.fromkeys(list(v["weight_map"])[:5], SHARDS[2])))
    opened = open_checkpoint(folder)
    assert (opened.dense, opened.experts) == (expected.dense, expected.experts)
    assert any("out of date" in text for text in opened.warnings)


@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_in_two_files_is_refused(folder: Path, index: bool) -> None:
    put(folder, "model-extra.safetensors", {"model.norm.weight": (64,)})
    if index:
        edit(folder / INDEX, lambda v: v["weight_map"].update({"model.extra": "model-extra.safetensors"}))
    else:
        (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is in both"):
        open_checkpoint(folder)


def test_a_sidecar_of_mtp_tensors_is_set_apart(folder: Path) -> None:
    (folder / INDEX).unlink()
    put(folder, "model-mtp.safetensors", {"mtp.fc.weight": (64, 128), "mtp.layers.0.mlp.gate.weight": (8, 64)})
    opened = open_checkpoint(folder)
    assert sorted(opened.mtp) == ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"]
    assert not any(is_mtp(name) for name in opened.dense)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 5}}']
)
def test_an_index_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(SwiftletError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a\\b"])
def test_an_index_cannot_name_files_outside(folder: Path, file: str) -> None:
    edit(folder / INDEX, lambda v: v["weight_map"].update({"model.norm.weight": file}))
    with pytest.raises(SwiftletError, match="does not stay inside"):
        open_checkpoint(folder)


def test_a_cut_shard_is_refused_by_name(folder: Path) -> None:
    with open(folder / SHARDS[1], "r+b") as file:
        file.truncate((folder / SHARDS[1]).stat().st_size - 1)
    with pytest.raises(SafetensorsError, match="00002-of-00003"):
        open_checkpoint(folder)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is this a model folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "num_hidden_layers": 4}')
    with pytest.raises(CheckpointError, match="no model"):
        open_checkpoint(tmp_path)


def test_a_container_is_no_checkpoint(original: Path, tmp_path: Path) -> None:
    container = repack_checkpoint(original, tmp_path / "model.qpack")
    with pytest.raises(CheckpointError, match="swiftlet-mlx verify"):
        open_checkpoint(container)


# ---- what the config says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
@pytest.mark.parametrize("nested", [True, False])
def test_the_expert_count_is_found_under_every_spelling(key: str, nested: bool) -> None:
    inner = {"num_hidden_layers": 4, key: 8, "num_experts_per_tok": 2}
    config = {"model_type": "some_moe", "text_config": inner} if nested else {"model_type": "some_moe", **inner}
    found = ModelConfig.from_dict(config, "here")
    assert (found.layer_count, found.expert_count, found.top_k) == (4, 8, 2)


def test_layers_are_counted_where_only_their_kinds_are_listed() -> None:
    config: dict[str, Any] = {"model_type": "nemotron_h", "hybrid_override_pattern": "ME*E"}
    assert ModelConfig.from_dict(config, "here").layer_count == 4
    config = {"model_type": "nemotron_h", "num_hidden_layers": None, "layers_block_type": ["mamba", "moe", "attention"]}
    assert ModelConfig.from_dict(config, "here").layer_count == 3


@pytest.mark.parametrize("count", [0, None, "8", -8, True, 8.0, 10**9])
def test_an_unusable_expert_count_is_taken_from_the_tensors(folder: Path, count: Any) -> None:
    edit(folder / "config.json", lambda c: c.update(num_experts=count))
    assert {t.expert_count for t in open_checkpoint(folder).tables.values()} == {8}


def test_another_expert_count_is_refused(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(num_experts=16))
    with pytest.raises(ConfigError, match=r"config\.json has 16 experts, the tensors of layer 0 have \[8\]"):
        open_checkpoint(folder)


def test_a_model_without_experts_is_never_loaded_in_full(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "dense", kind="qwen3_moe", shape={"layers": 2}, mlp_only_layers=[0, 1])
    with pytest.raises(StreamingUnsupported, match=r"no routed experts to stream although config\.json speaks of 8"):
        open_checkpoint(folder)


QUANTIZED = "model.layers.0.mlp.switch_mlp.up_proj"


@pytest.mark.parametrize(
    "key",
    [QUANTIZED, f"language_model.{QUANTIZED}", f"model.language_model.{QUANTIZED.removeprefix('model.')}",
     QUANTIZED.removeprefix("model.")],
)  # fmt: skip
def test_a_quantization_entry_counts_under_every_prefix(folder: Path, key: str) -> None:
    edit(folder / "config.json", lambda c: c["quantization"].update({key: {"group_size": 32, "bits": 4}}))
    open_checkpoint(folder)
    edit(folder / "config.json", lambda c: c["quantization"].update({key: {"group_size": 32, "bits": 6}}))
    with pytest.raises(ConfigError, match=r"claims 6 bits .* its tensors have 4"):
        open_checkpoint(folder)


def test_a_lie_about_the_head_is_refused_with_claimed_and_found(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c["quantization"].update({"lm_head": {"group_size": 32, "bits": 8}}))
    with pytest.raises(ConfigError, match=r"claims 8 bits \(group size 32\) for lm_head, its tensors have 4"):
        open_checkpoint(folder)


def test_the_same_width_is_found_with_or_without_entries(tmp_path: Path) -> None:
    """Four spellings of one mixed checkpoint give the same tables, and the same logits."""
    from swiftlet_mlx.loader import load_streamed

    folder = make_checkpoint(tmp_path / "mixed", kind="qwen3_5_moe", bits="mixed")
    config = read_config(folder)
    ids = mx.array([[1, 2, 3]])
    tables, logits = open_checkpoint(folder).tables, load_streamed(folder)[0](ids)
    for rename in (
        lambda k: k.replace("language_model.model.", "model.language_model."),
        lambda k: k.removeprefix("language_model.model."),
        lambda k: None,
    ):
        settings = {
            (rename(k) if isinstance(v, dict) else k): v
            for k, v in config["quantization"].items()
            if not isinstance(v, dict) or rename(k)
        }
        (folder / "config.json").write_text(json.dumps({**config, "quantization": settings}))
        assert open_checkpoint(folder).tables == tables
        assert mx.array_equal(load_streamed(folder)[0](ids), logits).item()


def test_a_quantization_entry_on_empty_tensors_is_refused(folder: Path) -> None:
    put(folder, "model-odd.safetensors", {"model.odd.weight": (8, 0), "model.odd.scales": (8, 0)})
    edit(folder / INDEX, lambda v: v["weight_map"].update({"model.odd.weight": "model-odd.safetensors"}))
    edit(folder / "config.json", lambda c: c["quantization"].update({"model.odd": {"group_size": 32, "bits": 4}}))
    with pytest.raises(ConfigError, match=r"model\.odd quantized"):
        open_checkpoint(folder)


def test_vision_and_mtp_are_told_by_name() -> None:
    assert is_vision("vision_tower.blocks.0.attn.qkv.weight")
    assert is_vision("model.visual.merger.weight")
    assert not is_vision("model.layers.0.mlp.gate.weight")
    assert is_mtp("mtp.norm.weight")
    assert is_mtp("language_model.mtp.norm.weight")
    assert not is_mtp("model.norm.weight")


# ---- headers of strangers ------------------------------------------------------------------------------------------

tensor_names = st.sampled_from(
    [
        f"model.layers.{n}.mlp.switch_mlp.{p}.{part}"
        for n in (0, 3, 9)
        for p in ("gate_proj", "up_proj", "down_proj", "fc1")
        for part in ("weight", "scales", "biases", "bias")
    ]
    + ["model.norm.weight", "lm_head.weight", "lm_head.scales", "model.layers.0.linear_attn.conv1d.weight"]
)  # fmt: skip
tensors = st.dictionaries(
    tensor_names,
    st.tuples(st.sampled_from(["F32", "U32"]), st.lists(st.integers(0, 3), max_size=4).map(tuple)),
    max_size=9,
)


@given(tensors, st.sampled_from([None, 0, 1, 2]))
@settings(max_examples=60)
def test_any_headers_open_consistently_or_are_refused_in_words(found: dict[str, Any], experts: int | None) -> None:
    text = build_header([(name, *entry) for name, entry in found.items()])
    size = len(text) + sum(tensor_bytes(*entry) for entry in found.values())
    config = {
        "model_type": "some_moe", "num_hidden_layers": 4, "num_experts": experts,
        "quantization": {"lm_head": {"bits": 4, "group_size": 32}},
    }  # fmt: skip
    headers = {"model.safetensors": parse_header(text[8:], size, "here")}
    try:
        opened = checkpoint_from_headers(Path("here"), config, headers, None)
    except SwiftletError:
        return
    placed = [*opened.dense.values(), *opened.mtp.values(), *opened.vision.values()]
    placed += [at for parts in opened.experts.values() for at in parts.values()]
    assert sorted(at.info.name for at in placed) == sorted(found)
    for layer, table in opened.tables.items():
        assert {s.name: s.shape for s in table.sections} == {
            name: at.info.shape[1:] for name, at in opened.experts[layer].items()
        }
