"""`doctor`: two minutes on a new machine. Does streaming work here, how fast could it be, which settings are good."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console, options, remembered

if TYPE_CHECKING:
    from swiftlet_bench.predict import Prediction, Shape

    from swiftlet_mlx.doctor import Finding

EXAMPLE = "Example: swiftlet-mlx doctor --quick"
SAMPLE_BYTES = 10**9
ROUNDS = 3
TOKENS, QUICK_TOKENS = 200, 64  # said with few slots and with all
MARKS = {"ok": "ok   ", "warn": "NOTE ", "wrong": "WRONG", "skipped": "-    "}


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A small model to try with.")] = "demo",
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="FOLDER", help="Measure the disk of this folder.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Correctness only: no disk, no speed.")] = False,
    remember: Annotated[
        bool, typer.Option("--remember/--no-remember", help="Use good settings in later commands.")
    ] = True,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check that streaming is right on this machine, and how fast.

    Exit code 1 if something is wrong. Without --quick it takes about two minutes and writes 1 GB for a while.
    """
    from swiftlet_bench import machine

    from swiftlet_mlx.locate import find_model
    from swiftlet_mlx.reader import open_source

    source, _ = open_source(find_model(model))  # a model that cannot be streamed anywhere is no finding
    source.close()
    findings: list[Finding] = []
    for finding in _findings(model, quick, quiet):
        findings.append(finding)
        if not quiet and not json:
            _tell(finding)
    speeds: dict[str, Any] = {} if quick else _speeds(model, folder, quiet, remember)
    wrong = [f.name for f in findings if f.verdict == "wrong"]
    here = machine.machine()
    if json:
        report = {
            "machine": asdict(here),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "findings": [asdict(f) for f in findings],
            **speeds,
            "wrong": wrong,
        }
        console.write(jsonlib.dumps(report) + "\n")
    else:
        lines = [f"swiftlet-mlx doctor, commit {machine.commit()}", str(here)]
        lines.append(" ".join(f"{k}={v}" for k, v in machine.versions().items()))
        lines += [f"{MARKS[f.verdict]} {f.name}: {without_paths(f.said)}" for f in findings]
        lines += speeds.get("lines", [])
        if not quiet:
            console.say("\nThe same and more, to be pasted into a report:")
        console.write("```\n" + "\n".join(lines) + "\n```\n")
        console.say(_verdict(findings, speeds))
    raise typer.Exit(1 if wrong else 0)


def _findings(model: str, quick: bool, quiet: bool) -> Iterator[Finding]:
    from functools import partial

    from swiftlet_mlx import doctor as checks
    from swiftlet_mlx.locate import find_model

    folder = find_model(model)
    n_tokens = QUICK_TOKENS if quick else TOKENS
    yield checks.check_versions()
    yield checks.check_memory()
    for device in checks.devices():
        name = f"{device.type.name}".upper()
        yield checks.run(partial(checks.check_host_writes, device), f"host writes, {name}")
        yield checks.run(partial(checks.check_slot_reuse, folder, device, n_tokens), f"slot reuse, {name}")
        yield checks.run(partial(checks.check_oracle, folder, device), f"oracle, {name}")


def _speeds(model: str, folder: Path | None, quiet: bool, remember: bool) -> dict[str, Any]:
    """Disk and device rates, what the released models should reach, and the settings of MLX that are worth it."""
    from swiftlet_bench import io, io_choice, predict, rates, shapes, variants

    from swiftlet_mlx.device import backend
    from swiftlet_mlx.library import models_folder
    from swiftlet_mlx.locate import find_model
    from swiftlet_mlx.machine import available_bytes

    place = folder or next(p for p in (models_folder(), *models_folder().parents) if p.is_dir())
    wanted = [predict.shape_of(name, shapes.preset(name)) for name in shapes.RELEASED]
    sizes = sorted({shape.expert_bytes for shape in wanted})
    with _sample_file(place) as path, console.steps(quiet) as progress:
        disk = io.measure(path, sizes=sizes, threads=(1, 4, 8), rounds=ROUNDS, states=(True,), progress=progress)
        choice = io_choice.measure(path, sizes[0], rounds=ROUNDS)  # last: it leaves bytes in the page cache
    rate = rates.measure()
    free = available_bytes()
    lines = [
        "disk: " + ", ".join(
            f"{console.size(r.case.read_bytes)} x {r.case.threads} threads {r.bytes_per_second.median / 1e9:.2f} GB/s"
            for r in disk
        ),
        f"weights {rate.weights / 1e9:.2f} GB/s through a 4-bit product, read-back {rate.read_back * 1e3:.3f} ms",
        f"reads: first ones past the page cache {choice.direct_times.median:.2f} times as fast as through it "
        f"({choice.direct_times.low:.2f}-{choice.direct_times.high:.2f}), so --io auto is {choice.io}",
    ]  # fmt: skip
    models = []
    for shape in wanted:
        prediction = _for_machine(shape, free, rate, io.bandwidth(disk, shape.expert_bytes))
        lines.append(_in_words(shape, prediction, free))
        models.append({"model": shape.name, **(asdict(prediction) if prediction else {"fits": False})})
    found: dict[str, Any] = {"models": models, "disk_bytes_per_second": {n: io.bandwidth(disk, n) for n in sizes}}
    found |= {"reads": {"io": choice.io, "direct_times": choice.direct_times.values}}
    reads = remembered.Reads(choice.io, round(choice.direct_times.median, 3))
    remember = remember and _remembered(reads=reads)
    if remember:
        found["kept"] = [f"--io {choice.io}"]
    found |= {"weight_bytes_per_second": rate.weights, "read_back_seconds": rate.read_back}
    if backend() == "metal":  # not run here
        with console.steps(quiet) as progress:
            tried = variants.measure(find_model(model), progress=progress)
        lines += [
            f"{t.name}: {t.speed.median:.1f} tok/s, {t.times.median:.2f} times as shipped"
            + ("" if t.same_output else ", OUTPUT DIFFERS")
            for t in tried
        ]
        best = variants.recommended(tried)
        found |= {"variants": [asdict(t) for t in tried], "recommended": dict(best)}
        if remember and _remembered(best):
            found["kept"] += [f"{k}={v}" for k, v in best.items()]
    return {**found, "lines": lines}


@contextmanager
def _sample_file(place: Path) -> Iterator[Path]:
    """A file to measure a disk with.

    Raises:
        OptionError: it cannot be written there, and what to do instead.
    """
    from swiftlet_bench import io

    from swiftlet_mlx.errors import OptionError

    with ExitStack() as stack:
        try:
            path = stack.enter_context(io.sample_file(place, SAMPLE_BYTES))
        except OSError as error:
            raise OptionError(
                f"the disk cannot be measured, for {console.size(SAMPLE_BYTES)} cannot be written to {place} "
                f"({error.strerror}); --folder names another place, --quick leaves disk and speed out"
            ) from None
        yield path


def _remembered(values: Mapping[str, str] | None = None, reads: remembered.Reads | None = None) -> bool:
    """Keep settings, if the home folder takes them."""
    try:
        remembered.remember(values, reads)
    except OSError as error:
        console.warn(f"settings are not kept: {remembered.path()}: {error.strerror}")
        return False
    return True


def _for_machine(shape: Shape, free: int, rate: Any, disk: float) -> Prediction | None:
    """What a model should reach with the memory that is free here, None if its dense part does not fit."""
    from swiftlet_bench import predict

    from swiftlet_mlx.memory import OTHERS_SHARE, PROCESS_BYTES

    left = int(free * (1 - OTHERS_SHARE)) - PROCESS_BYTES - shape.dense_bytes
    if left < shape.cycle_bytes // shape.layers:
        return None
    return predict.predict(shape, min(left, shape.all_experts_bytes), rate, disk)


def _in_words(shape: Shape, prediction: Prediction | None, free: int) -> str:
    if prediction is None:
        dense = console.size(shape.dense_bytes)
        return f"{shape.name}, 4-bit: does not run here, its dense part takes {dense} of {console.size(free)}"
    return (
        f"{shape.name}, 4-bit: about {prediction.tokens_per_second:.2g} tok/s expected with "
        f"{console.size(prediction.cache_bytes)} of experts in memory ({console.size(shape.all_experts_bytes)} on disk)"
    )


def without_paths(text: str) -> str:
    """Text with every absolute path cut to its last name: folders of a home name a person."""
    text = text.replace(str(Path.home()), "~")
    return re.sub(r"(?<![\w.:/])[~/][^\s:,;'\"]*/([^\s/:,;'\"]+)", r"\1", text)


def _tell(finding: Finding) -> None:
    style = {"warn": "yellow", "wrong": "red"}.get(finding.verdict)
    console.say(f"{MARKS[finding.verdict]} {finding.name}: {finding.said}", style)
    if finding.advice:
        console.say(f"      {finding.advice}", style)


def _verdict(findings: list[Finding], speeds: dict[str, Any]) -> str:
    wrong = [f for f in findings if f.verdict == "wrong"]
    if wrong:
        advice = wrong[0].advice[:1].upper() + wrong[0].advice[1:]
        return f"Something is wrong: {'; '.join(f.name for f in wrong)}. {advice}."
    kept = speeds.get("kept")
    note = f" Settings kept for later commands: {', '.join(kept)}." if kept else ""
    return f"Streaming is right on this machine.{note}"
