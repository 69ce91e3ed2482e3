"""The doctor finds health where there is health, and each disease it is made for where it is planted."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from swiftlet_bench import rates, variants
from swiftlet_bench.harness import Spread
from swiftlet_bench.rates import Rates
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx import doctor, loader
from swiftlet_mlx.checkpoint import open_checkpoint
from swiftlet_mlx.cli import doctor as command
from swiftlet_mlx.cli import left_open, remembered
from swiftlet_mlx.cli.app import app
from swiftlet_mlx.cli.run import run
from swiftlet_mlx.errors import OptionError, ReadFailed
from swiftlet_mlx.oracle import Comparison
from swiftlet_mlx.qpack import open_container
from swiftlet_mlx.slots import SlotPool
from swiftlet_mlx.unpack import unpack

CPU = mx.Device(mx.cpu)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("doctor") / "source", kind="qwen3_5_moe", bits=4)


@pytest.fixture(scope="module")
def container(checkpoint: Path) -> Path:
    return repack_checkpoint(checkpoint, checkpoint.parent / "m.qpack")


# ---- health


def test_a_healthy_machine_is_found_healthy(container: Path, checkpoint: Path) -> None:
    assert CPU in doctor.devices()
    assert doctor.check_versions().verdict == "ok"
    assert doctor.check_memory().verdict in ("ok", "warn")
    assert doctor.check_host_writes(CPU).verdict == "ok"
    assert doctor.check_slot_reuse(container, CPU, 12).verdict == "ok"
    for folder in (container, checkpoint):
        found = doctor.check_oracle(folder, CPU, 6)
        assert found.verdict == "ok", found
        assert "bit by bit" in found.said
    assert mx.default_device() == CPU


def test_a_container_unpacks_into_the_tensors_it_was_made_from(
    container: Path, checkpoint: Path, tmp_path: Path
) -> None:
    source = open_checkpoint(checkpoint)
    modules = {layer: f"language_model.model.layers.{layer}.mlp.switch_mlp" for layer in source.tables}
    again = open_checkpoint(unpack(open_container(container), modules, tmp_path / "again"))

    def everything(opened: Any) -> dict[tuple[object, str], bytes]:
        at = {("dense", name): t for name, t in opened.dense.items()}
        at |= {(layer, name): t for layer, parts in opened.experts.items() for name, t in parts.items()}
        return {
            key: (opened.folder / t.file).read_bytes()[t.info.start : t.info.stop]
            for key, t in sorted(at.items(), key=str)
        }

    assert everything(again) == everything(source)


# ---- diseases


def test_a_device_that_does_not_see_host_writes_gets_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "_sees_host_writes", lambda self: False)
    assert doctor.check_host_writes(CPU).verdict == "warn"


def test_a_device_that_sees_them_only_at_first_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = [memoryview(bytearray(64 * 128 * 4))]
    monkeypatch.setattr(SlotPool, "rows", lambda self, slot: stale)
    found = doctor.check_host_writes(CPU)
    assert found.verdict == "wrong"
    assert "old bytes" in found.said


def confuse_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand out a neighbour's slot when a layer holds fewer experts than it has."""
    right = SlotPool.lookup_few

    def wrong(self: SlotPool, *given: Any) -> mx.array:
        slots = right(self, *given)
        return slots if self.n_slots == self.table.expert_count else (slots + 1) % self.n_slots

    monkeypatch.setattr(SlotPool, "lookup_few", wrong)


def test_a_confused_slot_table_is_found_by_reuse_and_by_the_oracle(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_smallest_gb", lambda folder, waves=True: 0.00004)  # two slots a layer
    assert doctor.check_slot_reuse(container, CPU, 8).verdict == "ok"
    confuse_slots(monkeypatch)
    reuse, oracle = doctor.check_slot_reuse(container, CPU, 8), doctor.check_oracle(container, CPU, 3)
    assert (reuse.verdict, oracle.verdict) == ("wrong", "wrong")
    assert "differs" in reuse.said
    assert "report" in reuse.advice


def test_slots_that_are_overwritten_too_early_are_found(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race that only a GPU can have, forced: bytes change between the building of a graph and its evaluation."""
    stock = loader.Pools._evaluate

    def late(self: Any, *arrays: mx.array, **named: Any) -> None:
        for pool in self.layers.values():
            if pool.n_slots < pool.table.expert_count:
                for view in pool.rows(0):
                    view[:16] = bytes(16)
        stock(self, *arrays, **named)

    monkeypatch.setattr(loader.Pools, "_evaluate", late)
    found = doctor.run(lambda: doctor.check_slot_reuse(container, CPU, 8), "reuse")
    assert found.verdict == "wrong"


@pytest.mark.parametrize(
    ("layers", "logits", "first", "exactly", "verdict"),
    [
        ((0.0,), 0.0, None, True, "ok"),
        ((0.0,), 0.0, 3, True, "wrong"),  # all numbers equal, yet another token was said
        ((1e-6,), 1e-6, None, True, "wrong"),
        ((0.5,), 0.1, None, False, "ok"),
        ((0.5,), 0.1, 5, False, "warn"),
        ((9.0,), 4.0, 5, False, "wrong"),
    ],
)
def test_the_oracle_is_judged_by_bits_on_the_cpu_and_by_tokens_on_a_gpu(
    layers: tuple[float, ...], logits: float, first: int | None, exactly: bool, verdict: str
) -> None:
    found = Comparison(10, (1, 2, 3, 4, 5, 6), layers, logits, first)
    assert doctor.judge_oracle("oracle", found, exactly).verdict == verdict


def test_a_device_that_does_not_repeat_itself_is_a_note(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(([1, 2, 3], [1, 2, 4], [1, 2, 5]))
    monkeypatch.setattr(doctor, "_greedy", lambda *_: (next(said), 8))
    assert doctor.check_slot_reuse(container, CPU).verdict == "warn"


def test_an_untested_version_is_a_note_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.40.1")
    found = doctor.check_versions()
    assert found.verdict == "warn"
    assert "pip install 'mlx>=0.32.2" in found.advice


def test_few_open_files_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: (64, 64))
    assert "ulimit" in doctor.check_memory().advice


def test_a_check_that_breaks_is_a_finding_of_its_own() -> None:
    def broken() -> doctor.Finding:
        raise ReadFailed("layer 3, expert 5: short")

    found = doctor.run(broken, "oracle")
    assert (found.name, found.verdict) == ("oracle", "wrong")
    assert "expert 5" in found.said


# ---- the command


def fine(*_: object) -> doctor.Finding:
    return doctor.Finding("a check", "ok", "stands in for one that takes long")


def doctored(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(app, ["doctor", *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_doctor_ends_with_a_block_to_share_and_a_plain_verdict(
    container: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_oracle", fine)
    monkeypatch.setattr(command, "QUICK_TOKENS", 12)
    code, out, err = doctored(capsys, str(container), "--quick", "--quiet")
    assert code == 0
    assert "12 tokens" in out
    assert out.startswith("```\nswiftlet-mlx doctor")
    assert out.endswith("```\n")
    assert out.count("ok   ") == 5
    assert str(container.parent) not in out
    assert err.strip().endswith("Streaming is right on this machine.")


def test_doctor_exits_with_1_and_says_what_to_do_when_something_is_wrong(
    container: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> doctor.Finding:
        raise ReadFailed(f"{Path.home()}/models/x.qpack/layer_01.bin: short")

    monkeypatch.setattr(doctor, "check_slot_reuse", broken)
    monkeypatch.setattr(doctor, "check_oracle", fine)
    code, out, err = doctored(capsys, str(container), "--quick", "--quiet")
    assert code == 1
    assert "WRONG slot reuse, CPU: ReadFailed: layer_01.bin: short" in out
    assert str(Path.home()) not in out
    assert "Please report this" in err
    code, out, _ = doctored(capsys, str(container), "--quick", "--quiet", "--json")
    assert code == 1
    assert json.loads(out)["wrong"] == ["slot reuse, CPU"]


def test_a_disk_that_cannot_be_measured_is_told_with_what_to_do_instead(
    container: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for check in ("check_oracle", "check_slot_reuse"):
        monkeypatch.setattr(doctor, check, fine)
    monkeypatch.setattr("swiftlet_bench.io.sample_file", full)
    code, _, err = doctored(capsys, str(container), "--folder", str(tmp_path), "--quiet")
    assert code == 2
    assert "No space left on device); --folder" in err
    assert "--quick" in err


def test_settings_that_cannot_be_kept_are_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert not command._remembered({})
    assert "warning: settings are not kept" in capsys.readouterr().err


def test_doctor_predicts_models_from_what_it_measures(
    container: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "measure", lambda: Rates(100e9, 0.3e-3))
    for name in ("check_slot_reuse", "check_oracle"):
        monkeypatch.setattr(doctor, name, fine)
    monkeypatch.setattr(command, "SAMPLE_BYTES", 15_000_000)
    monkeypatch.setattr(command, "ROUNDS", 1)
    code, out, _ = doctored(capsys, str(container), "--folder", str(tmp_path), "--quiet", "--json")
    assert code == 0
    said = json.loads(out)
    assert [m["model"] for m in said["models"]] == ["qwen3.6-35b", "qwen3-next-80b", "qwen3.5-397b"]
    assert all(rate > 0 for rate in said["disk_bytes_per_second"].values())
    assert said["reads"]["io"] == left_open.io_for("auto")
    assert f"--io auto is {said['reads']['io']}" in " ".join(said["lines"])
    assert said["kept"] == [f"--io {said['reads']['io']}"]
    remembered.path().unlink()
    _, out, _ = doctored(capsys, str(container), "--folder", str(tmp_path), "--quiet", "--json", "--no-remember")
    assert "kept" not in json.loads(out)
    assert remembered.reads() is None


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("/Users/ann/models/x.qpack/config.json: gone", "config.json: gone"),
        ("see http://example.org/a/b and 3/4 or a/b", "see http://example.org/a/b and 3/4 or a/b"),
        ("'/data/t.bin'", "'t.bin'"),
    ],
)
def test_shared_text_has_no_folders(text: str, shared: str) -> None:
    assert command.without_paths(text) == shared


# ---- what is remembered


def test_remembered_settings_reach_a_later_command_before_mlx_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered.remember({"MLX_METAL_FAST_SYNCH": "1", "LD_PRELOAD": "x"})
    remembered.remember(reads=remembered.Reads("direct", 1.4))
    assert json.loads(remembered.path().read_text()) == {
        "environment": {"MLX_METAL_FAST_SYNCH": "1"}, "reads": {"io": "direct", "direct_times": 1.4},
    }  # fmt: skip
    program = (
        "import os, sys; sys.argv = ['swiftlet-mlx', '--version']; import swiftlet_mlx.cli.app as a; "
        "assert 'mlx' not in sys.modules\n"
        "try: a.main()\nexcept SystemExit: pass\n"
        "print(os.environ['MLX_METAL_FAST_SYNCH'])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == "1"
    monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "0")
    remembered.apply()
    assert os.environ["MLX_METAL_FAST_SYNCH"] == "0"  # what the user has set stays


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"environment": 5}', '{"environment": {"LD_PRELOAD": "1"}}',
     '{"reads": {"io": "fast", "direct_times": 2}}', '{"reads": {"io": "direct", "direct_times": NaN}}', '{"reads": 5}',
     '{"reads": {"io": "direct", "direct_times": "x"}}', '{"environment": {"MLX_METAL_FAST_SYNCH": "$(x)"}}',
     '{"environment": {"MLX_METAL_FAST_SYNCH": 1}}'],
)  # fmt: skip
def test_a_damaged_or_foreign_settings_file_sets_nothing(text: str) -> None:
    assert remembered.environment() == {}
    remembered.path().parent.mkdir(parents=True, exist_ok=True)
    remembered.path().write_text(text)
    assert remembered.environment() == {}
    assert remembered.reads() is None
    assert left_open.io_for("auto") == "cached"


def test_reads_go_as_doctor_has_found_unless_the_user_says_otherwise() -> None:
    assert "`swiftlet-mlx doctor` measures" in left_open.io_in_words()
    remembered.remember({"MLX_METAL_FAST_SYNCH": "1"}, remembered.Reads("direct", 1.4))
    remembered.remember({})  # other settings come and go
    assert [left_open.io_for(given) for given in ("auto", "cached", "direct")] == ["direct", "cached", "direct"]
    assert left_open.io_in_words().startswith("direct (measured by doctor")
    assert "1.40 times" in left_open.io_in_words()
    with pytest.raises(OptionError, match="fast"):
        left_open.io_for("fast")


def test_on_metal_good_settings_are_measured_and_kept(
    container: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metal itself cannot be had here; the way from a measurement to a kept setting can."""
    one, better = Spread((10.0, 10.0, 10.0)), Spread((1.2, 1.3, 1.2))
    fast = {"MLX_METAL_FAST_SYNCH": "1"}
    tried = [variants.Tried("as shipped", {}, one, Spread((1.0,) * 3), True)]
    tried.append(variants.Tried("fast fences", fast, one, better, True))
    monkeypatch.setattr("swiftlet_mlx.device.backend", lambda: "metal")
    monkeypatch.setattr(variants, "measure", lambda *args, **kwargs: tried)
    monkeypatch.setattr(rates, "measure", lambda: Rates(100e9, 0.3e-3))
    for name in ("check_slot_reuse", "check_oracle"):
        monkeypatch.setattr(doctor, name, fine)
    monkeypatch.setattr(command, "SAMPLE_BYTES", 15_000_000)
    monkeypatch.setattr(command, "ROUNDS", 1)
    _, out, err = doctored(capsys, str(container), "--folder", str(tmp_path), "--quiet")
    assert "fast fences: 10.0 tok/s, 1.20 times as shipped" in out
    assert f"Settings kept for later commands: --io {left_open.io_for('auto')}, MLX_METAL_FAST_SYNCH=1." in err
    assert remembered.environment() == fast


def test_variants_run_in_processes_with_their_environment(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def one(folder: Path, *, environment: dict[str, str], **_: object) -> SimpleNamespace:
        speed = 12.0 if environment else 10.0
        seen.append((folder.name, environment.get("X", "")))
        return SimpleNamespace(values={"decode_tokens_per_second": speed}, output="same")

    monkeypatch.setattr(variants.children, "one", one)
    tried = variants.measure(container, {"plain": {}, "other": {"X": "1"}}, rounds=2)
    assert seen == [("m.qpack", ""), ("m.qpack", "1")] * 2
    assert tried[1].worth_it
    assert np.allclose(tried[1].times.values, 1.2)
    assert variants.recommended(tried) == {"X": "1"}
