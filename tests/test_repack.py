"""Repacking: bytes are copied, never encoded; what is interrupted is continued; what is half-made has no name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from swiftlet_repack import verify as verifier
from swiftlet_repack import write
from swiftlet_repack.verify import verify
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx.errors import (
    DiskFull,
    HashMismatch,
    NotResumable,
    OutputExists,
    RawCheckpoint,
    RepackError,
    StreamingUnsupported,
    SwiftletError,
)
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.qpack import open_container

Tensors = dict[str, mx.array]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("repack") / "model", bits=4, tokenizer=True)
    (folder / "modeling_custom.py").write_text("raise SystemExit('never run, never copied')\n")
    (folder / "LICENSE").write_text("as you like it\n")
    return folder


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights_of(folder: Path) -> Tensors:
    return dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]


def save(folder: Path, weights: Tensors) -> None:
    mx.eval(*weights.values())
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def copy_of(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def test_layer_files_hold_the_sections_side_by_side_as_swiftlet_writes_them(source: Path, tmp_path: Path) -> None:
    container = repack_checkpoint(source, tmp_path / "out.qpack")
    weights = weights_of(source)
    for layer in range(4):
        blobs = bytearray()
        for expert in range(8):
            blob = bytearray()
            for projection in ("gate_proj", "up_proj", "down_proj"):
                for part in ("weight", "scales", "biases"):
                    stack = weights[f"model.layers.{layer}.mlp.switch_mlp.{projection}.{part}"]
                    blob += bytes(memoryview(stack[expert].view(mx.uint8)))  # type: ignore[arg-type]
            blobs += blob + bytes(-len(blob) % 16384)
        assert (container / f"packed_experts/layer_{layer:02d}.bin").read_bytes() == bytes(blobs)


def test_dense_tensors_keep_name_dtype_shape_and_bytes(source: Path, tmp_path: Path) -> None:
    container = repack_checkpoint(source, tmp_path / "out.qpack")
    ours, theirs = weights_of(container), weights_of(source)
    assert sorted(ours) == sorted(name for name in theirs if ".switch_mlp." not in name)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        assert mx.array_equal(array.view(mx.uint8), theirs[name].view(mx.uint8)).item(), name


def test_one_file_and_many_shards_give_the_same_container(tmp_path: Path) -> None:
    made = [
        repack_checkpoint(make_checkpoint(tmp_path / str(n) / "model", bits=4, shards=n), tmp_path / f"{n}.qpack")
        for n in (1, 5)
    ]
    assert tree(made[0]) == tree(made[1])


def test_the_container_is_complete_in_itself(source: Path, tmp_path: Path) -> None:
    from swiftlet_mlx import load

    container = repack_checkpoint(source, tmp_path / "out.qpack")
    moved = Path(shutil.move(container, tmp_path / "elsewhere.qpack"))
    names = {path.name for path in moved.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE", "hashes.json"} <= names
    assert "modeling_custom.py" not in names
    chats = [load(path)[1].apply_chat_template([{"role": "user", "content": "Hi"}]) for path in (source, moved)]
    assert chats[0] == chats[1]
    config, original = (json.loads((path / "config.json").read_text()) for path in (moved, source))
    assert config.pop("model_file") == "swiftlet_mlx_model.py"
    assert config == original


def test_hashes_cover_every_file_but_themselves(source: Path, tmp_path: Path) -> None:
    container = repack_checkpoint(source, tmp_path / "out.qpack")
    hashes = json.loads((container / "hashes.json").read_text())["files"]
    found = tree(container)
    found.pop("hashes.json")
    assert hashes == found


@pytest.mark.parametrize(
    ("kind", "bits", "overrides", "version"),
    [
        ("qwen3_next", 4, {}, 1),
        ("qwen3_5_moe", None, {}, 1),
        ("qwen3_5_moe", "mixed", {}, 2),
        ("qwen3_moe", 4, {"decoder_sparse_step": 2}, 2),
        ("qwen3_moe", 8, {"mlp_only_layers": [0, 3]}, 2),
    ],
)
def test_the_lowest_version_that_can_say_it_is_written_and_runs(
    tmp_path: Path, kind: str, bits: Any, overrides: dict[str, Any], version: int
) -> None:
    source = make_checkpoint(tmp_path / "model", kind=kind, bits=bits, **overrides)
    container = repack_checkpoint(source, tmp_path / "out.qpack")
    assert open_container(container).version == version
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    from mlx_lm.utils import load_model

    expected = load_model(source)[0](ids)
    assert mx.array_equal(load_streamed(container, cache_gb=0.0001)[0](ids), expected).item()
    assert verify(container, source).compared_bytes > 0


@pytest.mark.parametrize(
    ("kind", "bits", "mode", "bits_said", "last"),
    [
        ("gpt_oss", None, "affine", None, "down_proj.bias"),
        ("gpt_oss", 4, "mxfp4", 4, "down_proj.bias"),
        ("nemotron_h", 4, "affine", 4, "fc2.biases"),
        ("qwen3_moe", 8, "mxfp8", 8, "down_proj.scales"),
        ("qwen3_next", "widths", "affine", 4, "down_proj.biases"),
    ],
)
def test_what_version_1_readers_cannot_run_is_version_2_and_runs(
    tmp_path: Path, kind: str, bits: Any, mode: str, bits_said: int | None, last: str
) -> None:
    from mlx_lm.utils import load_model

    source = make_checkpoint(tmp_path / "model", kind=kind, bits=bits, mode=mode)
    container = repack_checkpoint(source, tmp_path / "out.qpack")
    opened = open_container(container)
    assert (opened.version, opened.quant_bits) == (2, bits_said)
    assert {table.sections[-1].name for table in opened.layers.values()} == {last}
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    expected = load_model(source)[0](ids)
    assert mx.array_equal(load_streamed(container, cache_gb=0.0002)[0](ids), expected).item()
    assert verify(container, source).compared_bytes == sum(at.nbytes for at in weights_of(source).values())


def test_a_scale_an_expert_is_carried_along(tmp_path: Path) -> None:
    """mlx runs nvfp4 with global scales on GPUs only, so here the bytes must do."""
    source = make_checkpoint(tmp_path / "model", kind="qwen3_moe", bits=4, mode="nvfp4")
    container = repack_checkpoint(source, tmp_path / "out.qpack")
    opened = open_container(container)
    section = next(s for s in opened.layers[1].sections if s.name == "down_proj.global_scale")
    assert (opened.version, section.shape, section.size) == (2, (), 4)
    stack = weights_of(source)["model.layers.1.mlp.switch_mlp.down_proj.global_scale"]
    blobs = (container / "packed_experts/layer_01.bin").read_bytes()
    found = [struct.unpack_from("<f", blobs, e * opened.layers[1].stride + section.offset)[0] for e in range(8)]
    assert found == stack.tolist()
    assert verify(container, source).compared_bytes > 0


def test_version_1_says_the_experts_width_whatever_the_default(tmp_path: Path) -> None:
    """Readers of version 1 take the experts' bits from the manifest alone."""
    source = make_checkpoint(tmp_path / "model", bits=4)
    config = json.loads((source / "config.json").read_text())
    config["quantization"] |= {"bits": 8, "group_size": 64}
    (source / "config.json").write_text(json.dumps(config))
    opened = open_container(repack_checkpoint(source, tmp_path / "out.qpack"))
    assert (opened.version, opened.quant_bits, opened.quant_group_size) == (1, 4, 32)


@pytest.mark.parametrize("piece", [1000, 16384, 40_000])
def test_experts_too_large_to_be_held_are_copied_and_compared_in_pieces(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    whole = repack_checkpoint(source, tmp_path / "whole.qpack")
    monkeypatch.setattr(write, "COPY_BYTES", piece)
    monkeypatch.setattr(verifier, "BLOCK_BYTES", piece)
    container = repack_checkpoint(source, tmp_path / "out.qpack")
    assert tree(container) == tree(whole)
    assert verify(container, source).compared_bytes == verify(whole, source).compared_bytes
    (container / "hashes.json").unlink()
    path = container / "packed_experts/layer_03.bin"
    data = bytearray(path.read_bytes())
    data[7 * 16384 + 3000] ^= 1
    path.write_bytes(data)
    with pytest.raises(HashMismatch, match=r"layer_03\.bin: expert 7, .*\(offset 117688 in the file\)"):
        verify(container, source)


def test_code_of_the_source_is_said_to_stay_behind(source: Path, tmp_path: Path) -> None:
    folder = copy_of(source, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "modeling_custom.py"}))
    said: list[str] = []
    container = repack_checkpoint(folder, tmp_path / "out.qpack", warn=said.append)
    assert any("modeling_custom.py" in text for text in said)
    assert not (container / "modeling_custom.py").exists()


def test_names_and_settings_in_any_script_survive(source: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "模型 \udcff"))  # the last is a byte that is no text
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "note": "half a pair \ud800, größe", "x": float("inf")}))
    container = repack_checkpoint(folder, tmp_path / "out.qpack")
    written = json.loads((container / "config.json").read_text())
    assert (written["note"], written["x"]) == ("half a pair \ud800, größe", float("inf"))
    assert open_container(container).source == folder.name


def test_mtp_is_kept_apart_vision_is_left_out_and_both_are_said(source: Path, tmp_path: Path) -> None:
    folder = copy_of(source, tmp_path)
    weights = weights_of(folder) | {"mtp.norm.weight": mx.ones(64), "vision_tower.patch.weight": mx.ones((4, 4))}
    save(folder, weights)
    said: list[str] = []
    container = repack_checkpoint(folder, tmp_path / "out.qpack", warn=said.append)
    assert sorted(dict(mx.load(str(container / "mtp.safetensors")))) == ["mtp.norm.weight"]  # type: ignore[arg-type]
    assert not [n for n in weights_of(container) if "mtp" in n or "vision" in n]
    assert any("mtp.safetensors" in text for text in said)
    assert any("1 vision tensors" in text for text in said)
    assert verify(container, folder).compared_bytes > 0


def test_a_missing_template_is_warned_about(source: Path, tmp_path: Path) -> None:
    folder = copy_of(source, tmp_path)
    (folder / "chat_template.jinja").unlink()
    said: list[str] = []
    repack_checkpoint(folder, tmp_path / "out.qpack", warn=said.append)
    assert any("no chat template" in text for text in said)


# ---- refused before anything is written ----------------------------------------------------------------------------


def raw_experts(weights: Tensors) -> Tensors:
    out = {k: v for k, v in weights.items() if ".switch_mlp." not in k}
    for layer in range(4):
        for name in ("gate_proj", "up_proj", "down_proj"):
            stack = weights[f"model.layers.{layer}.mlp.switch_mlp.{name}.weight"]
            out |= {f"model.layers.{layer}.mlp.experts.{e}.{name}.weight": stack[e] for e in range(8)}
    return out


def fused_experts(weights: Tensors) -> Tensors:
    out = {k: v for k, v in weights.items() if ".switch_mlp." not in k}
    return out | {"model.layers.0.mlp.experts.gate_up_proj": mx.zeros((8, 64, 64))}


def fp8(weights: Tensors) -> Tensors:
    return raw_experts(weights) | {"model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv": mx.ones((1, 1))}


def gptq(weights: Tensors) -> Tensors:
    return weights | {"model.layers.0.self_attn.q_proj.qweight": mx.zeros((4, 4), mx.uint32)}


def raw_convolution(weights: Tensors) -> Tensors:
    return {k: v.moveaxis(2, 1) if "conv1d" in k else v for k, v in weights.items()}


@pytest.mark.parametrize("spoil", [raw_experts, fused_experts, fp8, gptq, raw_convolution])
def test_what_mlx_lm_must_convert_is_refused_with_the_command(source: Path, tmp_path: Path, spoil: Any) -> None:
    folder = copy_of(source, tmp_path)
    save(folder, spoil(weights_of(folder)))
    with pytest.raises(RawCheckpoint, match=r"mlx_lm\.convert --hf-path"):
        repack_checkpoint(folder, tmp_path / "out.qpack")
    assert not list(tmp_path.glob("out.qpack*"))


def test_f8_tensors_are_never_copied_through_as_bytes(source: Path, tmp_path: Path) -> None:
    from swiftlet_mlx.safetensors import build_header

    folder = copy_of(source, tmp_path)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    extra = build_header([("model.layers.0.self_attn.q_proj.weight_f8", "F8_E4M3", (4,))]) + b"\0" * 4
    (folder / "model-f8.safetensors").write_bytes(extra)
    with pytest.raises(RawCheckpoint, match="FP8"):
        repack_checkpoint(folder, tmp_path / "out.qpack")


def test_a_dense_model_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    folder = copy_of(source, tmp_path)
    save(folder, {k: v for k, v in weights_of(folder).items() if ".switch_mlp." not in k})
    with pytest.raises(StreamingUnsupported, match=r"mlx_lm\.chat"):
        repack_checkpoint(folder, tmp_path / "out.qpack")


def test_an_existing_output_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    container = repack_checkpoint(source, tmp_path / "out.qpack")
    before = tree(container)
    with pytest.raises(OutputExists, match="--output"):
        repack_checkpoint(source, container)
    assert tree(container) == before


def test_too_little_room_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "free_bytes", lambda folder: 1000)
    with pytest.raises(DiskFull, match="needed"):
        repack_checkpoint(source, tmp_path / "out.qpack")
    assert not (tmp_path / "out.qpack").exists()


# ---- interruptions -------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from swiftlet_repack.write import repack_checkpoint
source, output, limit = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def progress(done, total, what):
    if done >= limit * total:
        os.kill(os.getpid(), signal.SIGKILL)
repack_checkpoint(source, output, progress=progress)
"""


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_killed_at_any_moment_the_same_command_finishes_the_same_container(
    source: Path, tmp_path: Path, share: float
) -> None:
    whole = repack_checkpoint(source, tmp_path / "whole.qpack")
    output = tmp_path / "out.qpack"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(source), str(output), str(share)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not output.exists(), "a half-made container has the name of a whole one"
    steps: list[int] = []
    repack_checkpoint(source, output, progress=lambda done, total, what: steps.append(done))
    assert tree(output) == tree(whole)
    assert not list(tmp_path.glob("*.partial"))
    if share >= 0.7:
        assert len(steps) < 14, "layers that were complete were copied again"


def test_a_changed_source_is_not_mixed_in(source: Path, tmp_path: Path) -> None:
    folder = copy_of(source, tmp_path)
    output = tmp_path / "out.qpack"
    subprocess.run([sys.executable, "-c", KILLED, str(folder), str(output), "0.5"], check=False)
    stat = (folder / "model.safetensors").stat()
    os.utime(folder / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    with pytest.raises(NotResumable, match="--restart"):
        repack_checkpoint(folder, output)
    assert verify(repack_checkpoint(folder, output, restart=True), folder).compared_bytes


def test_a_source_of_the_same_size_and_time_with_other_headers_is_not_mixed_in(source: Path, tmp_path: Path) -> None:
    folder = copy_of(source, tmp_path)
    output = tmp_path / "out.qpack"
    subprocess.run([sys.executable, "-c", KILLED, str(folder), str(output), "0.5"], check=False)
    path = folder / "model.safetensors"
    stat, data = path.stat(), path.read_bytes()
    path.write_bytes(data.replace(b"layers.0.input_layernorm", b"layers.0.inpuz_layernorm"))
    for index in folder.glob("*.index.json"):
        index.unlink()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(NotResumable, match="--restart"):
        repack_checkpoint(folder, output)


def test_a_source_that_changes_while_it_is_read_gives_no_container(source: Path, tmp_path: Path) -> None:
    folder, output = copy_of(source, tmp_path), tmp_path / "out.qpack"
    touched: list[str] = []

    def touch(done: int, total: int, what: str) -> None:
        if done > total / 2 and not touched:
            touched.append(what)
            os.utime(folder / "model.safetensors", (1, 1))

    with pytest.raises(RepackError, match="changed while it was read"):
        repack_checkpoint(folder, output, progress=touch)
    assert touched
    assert not output.exists()


def test_a_source_that_ends_early_is_named_and_gives_no_container(source: Path, tmp_path: Path) -> None:
    folder, output = copy_of(source, tmp_path), tmp_path / "out.qpack"

    def cut(done: int, total: int, what: str) -> None:
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(40_000)

    with pytest.raises(SwiftletError, match=r"model\.safetensors"):
        repack_checkpoint(folder, output, progress=cut)
    assert not output.exists()


def test_two_at_one_output_do_not_meet(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.qpack"
    refused: list[NotResumable] = []

    def second(done: int, total: int, what: str) -> None:
        if not refused:
            with pytest.raises(NotResumable, match="another process") as caught:
                repack_checkpoint(source, output)
            refused.append(caught.value)

    repack_checkpoint(source, output, progress=second)
    assert refused
    assert verify(output, source).compared_bytes


def test_what_lies_at_the_partial_name_and_is_not_ours_is_left_alone(source: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "out.qpack.partial/thesis.txt"
    stranger.parent.mkdir()
    stranger.write_text("ten years of work")
    with pytest.raises(OutputExists):
        repack_checkpoint(source, tmp_path / "out.qpack")
    assert stranger.read_text() == "ten years of work"


def test_a_full_disk_is_one_message_and_the_same_command_continues(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, real, calls = tmp_path / "out.qpack", os.fsync, [0]

    def full(fd: int) -> None:
        calls[0] += 1
        if calls[0] > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match="Make room and repeat the same command"):
            repack_checkpoint(source, output)
    assert not output.exists()
    assert verify(repack_checkpoint(source, output)).hashed_files > 0


# ---- size ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # writes 2 x 3 GB, then 2 x 1.8 GB
@pytest.mark.parametrize(
    ("layers", "experts", "inner", "width"), [(12, 64, 512, 1024), (1, 2, 16384, 6144)], ids=["many", "of 604 MB each"]
)
def test_memory_stays_bounded_whatever_the_size(
    tmp_path: Path, layers: int, experts: int, inner: int, width: int
) -> None:
    from swiftlet_mlx.safetensors import build_header, tensor_bytes

    folder, output = tmp_path / "model", tmp_path / "out.qpack"
    folder.mkdir()
    shapes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    tensors: list[tuple[str, str, tuple[int, ...]]] = [
        (f"model.layers.{layer}.mlp.switch_mlp.{name}.weight", "BF16", (experts, *shape))
        for layer in range(layers)
        for name, shape in shapes.items()
    ]
    tensors.append(("model.embed_tokens.weight", "BF16", (300_000, 1024)))
    config = {"model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(build_header(tensors))
        block = os.urandom(1 << 20)
        left = sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
        while left:
            left -= file.write(block[: min(left, len(block))])
    size = (folder / "model.safetensors").stat().st_size
    assert size > 1.7e9
    started = time.perf_counter()
    try:
        subprocess.run([sys.executable, "-m", "swiftlet_repack", "--source", folder, "--output", output], check=True)
        copied = time.perf_counter()
        command: list[str | Path] = [sys.executable, "-m", "swiftlet_mlx", "verify", output, "--source", folder]
        subprocess.run(command, check=True)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(output, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(
        f"{size / 1e9:.2f} GB: repack {copied - started:.1f} s, verify {time.perf_counter() - copied:.1f} s, "
        f"peak {peak / 1e6:.0f} MB"
    )
    assert peak < 300e6
