"""A checkpoint at its source becomes the container that downloading and repacking it would give."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_checkpoint import make_checkpoint
from loopback_hub import Content, Fault, LoopbackHub, folder_files
from swiftlet_repack.install import Installation, Outcome
from swiftlet_repack.outline import Outline
from swiftlet_repack.pace import Pace
from swiftlet_repack.patience import Patience
from swiftlet_repack.sources import Hub, Mirror
from swiftlet_repack.staging import MARGIN_BYTES, allocated_bytes
from swiftlet_repack.transfer import Progress
from swiftlet_repack.verify import verify
from swiftlet_repack.write import repack_checkpoint

from swiftlet_mlx.errors import (
    AccessDenied,
    Cancelled,
    DiskFull,
    HashMismatch,
    InstallError,
    NetworkFailed,
    NotResumable,
    SourceBroken,
    SourceChanged,
    SourceNotFound,
    SwiftletError,
    UnsafePath,
)

HASTY = Patience(
    stall_seconds=2, connect_seconds=1, first_wait=0.005, longest_wait=0.02, give_up_seconds=0.2,
    first_contact_tries=3, wrong_answer_tries=3,
)  # fmt: skip
SMALL = Pace(streams=4, span_bytes=20_000, record_bytes=5_000, record_seconds=0.05)
SHAPES: dict[str, dict[str, Any]] = {
    "one file": {"shards": 1},
    "float32": {"shards": 2, "quantized": False},
    "vision and mtp": {"shards": 3, "vision": True, "mtp": True, "layers": 3},
}


class Shop:
    """A checkpoint on disk, the same on the hub, and a place to install it."""

    def __init__(self, hub: LoopbackHub, folder: Path, **shape: Any) -> None:
        self.hub, self.folder = hub, folder
        self.made = make_checkpoint(folder / "Model", **shape)
        self.files: dict[str, Content] = folder_files(self.made)
        self.repo = hub.repo("Org/Model", self.files)
        self.output = folder / "out.qpack"
        self.work: Installation

    def install(
        self, watch: Callable[[Progress], None] | None = None, *, restart: bool = False, **options: Any
    ) -> tuple[Outline, Outcome]:
        source = Hub("Org/Model", endpoint=self.hub.endpoint, **options)
        with Installation(source, self.output, restart=restart, patience=HASTY, pace=SMALL) as self.work:
            outline = self.work.look()
            return outline, self.work.carry_out(watch)

    def check(self) -> None:
        """The result is the local repacker's, but for the source's name."""
        local = self.folder / "local.qpack"
        if not local.exists():
            repack_checkpoint(self.made, local)
        ours, theirs = content(self.output), content(local)
        origin = json.loads(ours.pop("source.json"))
        manifests = [json.loads(files.pop("manifest.json")) for files in (ours, theirs)]
        assert [m.pop("sourceCheckpoint") for m in manifests] == ["Org/Model", "Model"]
        assert manifests[0] == manifests[1]
        hashes = [json.loads(files.pop("hashes.json"))["files"] for files in (ours, theirs)]
        assert all(table.pop("manifest.json") for table in hashes)
        assert hashes[0] == hashes[1]
        assert ours == theirs
        assert (origin["source"], origin["revision"]) == ("Org/Model", self.repo.refs["main"])
        verify(self.output, self.made)
        assert not self.output.with_name("out.qpack.partial").exists()

    def total(self) -> int:
        return sum(f.stat().st_size for f in self.made.glob("*.safetensors"))


def content(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def shop(hub: LoopbackHub, tmp_path: Path) -> Shop:
    return Shop(hub, tmp_path, shards=3, vision=True, mtp=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_container_that_a_local_repack_gives(hub: LoopbackHub, tmp_path: Path, shape: str) -> None:
    shop = Shop(hub, tmp_path, **SHAPES[shape])
    outline, outcome = shop.install()
    shop.check()
    assert outcome.repairs == ()
    assert not outline.ready
    assert outline.dense_bytes == (shop.output / "model.safetensors").stat().st_size
    assert any("vision" in text for text in outline.left_out) == ("vision" in shape)
    sent = hub.body_bytes("*.safetensors")
    headers = 3 * 64  # the first bytes of a header are looked at once more than they are fetched
    assert shop.total() <= sent <= shop.total() + headers
    assert hub.body_bytes("README.md") == 0


@pytest.mark.parametrize("seed", range(4))
def test_however_often_it_is_stopped_the_result_is_the_same(shop: Shop, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        stop_at = rng.randrange(shop.total() // 2)

        def watch(moment: Progress, stop_at: int = stop_at) -> None:
            if moment.fetched_bytes >= stop_at:
                shop.work.cancel.set()

        shop.hub.bytes_per_second = 1_000_000
        shop.hub.faults[:] = [
            Fault("drop", "*.safetensors", at=rng.randrange(9_000), times=2),
            Fault("status", value=429, times=1, headers={"Retry-After": "0"}),
        ]
        try:
            shop.install(watch)
            break
        except Cancelled:
            assert not shop.output.exists()
    else:
        shop.hub.bytes_per_second = 0
        shop.install()
    shop.check()


def test_a_wrong_byte_in_an_expert_is_mended_and_named(shop: Shop) -> None:
    shop.hub.faults.append(Fault("corrupt", "model-00002*", at=30_000, times=1))
    _, outcome = shop.install()
    shop.check()
    assert [(r.file[:11], r.start, r.stop) for r in outcome.repairs] == [("model-00002", 30_000, 30_001)]


def test_a_header_that_does_not_parse_is_fetched_once_more(shop: Shop) -> None:
    shop.hub.faults.append(Fault("corrupt", "model-00001*", at=8, times=1))
    shop.install()
    shop.check()


def test_a_header_that_is_wrong_but_plausible_never_places_bytes_for_good(hub: LoopbackHub, tmp_path: Path) -> None:
    shop = Shop(hub, tmp_path, shards=1, layers=1)
    header = (shop.made / "model.safetensors").read_bytes()[:4000]
    at = header.index(b"norm.weight")  # one letter of a tensor's name: still a valid header
    hub.faults.append(Fault("corrupt", "model.safetensors", at=at, times=1))
    with pytest.raises(SwiftletError, match=r"header had arrived wrong|lacks|promises|Restart|--restart"):
        shop.install()
    assert not shop.output.exists()
    shop.install(restart=True)
    shop.check()


def peak_of(shop: Shop) -> tuple[Outline, int]:
    """Install, and look at the disk at the worst moments: whenever a shard is verified, before it gives back what is
    left out, and ten times a second."""
    true_drop, peak = Installation._drop_spare, [0]

    def look(*_: Any) -> None:
        peak.append(allocated_bytes(shop.work._staging.folder))

    def drop(self: Installation, delivery: Any) -> None:
        look()
        true_drop(self, delivery)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Installation, "_drop_spare", drop)
        outline, _ = shop.install(look)
    shop.check()
    return outline, max(peak)


JOURNAL_BYTES = 200_000


def test_the_vision_of_a_model_in_several_shards_takes_no_more_disk_than_the_container(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    shop = Shop(hub, tmp_path, shards=4, layers=4, experts=16, quantized=False, vision=40)
    vision = 40 * 64 * 192 * 2
    assert vision > 4 * JOURNAL_BYTES
    outline, peak = peak_of(shop)
    final = allocated_bytes(shop.output)
    assert 0 < peak <= final + JOURNAL_BYTES
    assert outline.needed_bytes <= outline.output_bytes + MARGIN_BYTES


def test_the_vision_of_a_model_in_one_shard_is_planned_for(hub: LoopbackHub, tmp_path: Path) -> None:
    shop = Shop(hub, tmp_path, shards=1, layers=2, experts=16, quantized=False, vision=40)
    vision = 40 * 64 * 192 * 2
    outline, peak = peak_of(shop)
    final = allocated_bytes(shop.output)
    assert final + vision - JOURNAL_BYTES < peak <= final + vision + JOURNAL_BYTES
    assert outline.output_bytes + vision <= outline.needed_bytes - MARGIN_BYTES + JOURNAL_BYTES
    assert peak <= outline.needed_bytes


def test_the_bytes_left_out_are_gone_from_the_disk_once_their_shard_is_verified(shop: Shop) -> None:
    spares: list[int] = []
    true_drop = Installation._drop_spare

    def drop(self: Installation, delivery: Any) -> None:
        true_drop(self, delivery)
        path = self._staging.state / "spare" / delivery.file.name
        spares.append(path.stat().st_size - self._job.headers[delivery.file.name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Installation, "_drop_spare", drop)
        shop.install()
    assert spares == [0, 0, 0]


# ---- what people meet ----------------------------------------------------------------------------


def test_a_gated_checkpoint_says_where_to_ask(shop: Shop) -> None:
    shop.repo.gated = True
    with pytest.raises(AccessDenied, match=r"gated.*Org/Model"):
        shop.install()
    shop.install(token=shop.hub.token)
    shop.check()


def test_a_missing_model_leaves_nothing_behind(shop: Shop) -> None:
    del shop.hub.repos["Org/Model"]
    with pytest.raises(SourceNotFound):
        shop.install()
    assert sorted(p.name for p in shop.folder.iterdir()) == ["Model"]


@pytest.mark.parametrize("where", ["hub", "cdn"])
def test_a_shard_that_answers_404_is_named_and_the_rest_kept(shop: Shop, where: str) -> None:
    shop.hub.faults.append(Fault("status", "model-00003*", where, value=404))
    with pytest.raises(SourceNotFound, match=r"model-00003-of-00003.safetensors: Org/Model has no such file"):
        shop.install()
    shop.hub.faults.clear()
    shop.install()
    shop.check()


def test_an_index_that_names_an_absent_shard_is_refused_by_name(shop: Shop) -> None:
    del shop.files["model-00002-of-00003.safetensors"]
    shop.repo.push(shop.files)
    with pytest.raises(SourceBroken, match=r"names model-00002-of-00003.safetensors.*2 of 3 shards"):
        shop.install()


def test_shards_that_some_file_system_cannot_keep_apart_are_refused(shop: Shop) -> None:
    """Their headers are kept side by side, on a Mac perhaps."""
    second, twin = "model-00002-of-00003.safetensors", "MODEL-00001-of-00003.safetensors"
    index = Path(str(shop.files["model.safetensors.index.json"])).read_bytes()
    files = {**shop.files, twin: shop.files[second]}
    del files[second]
    shop.repo.push({**files, "model.safetensors.index.json": index.replace(second.encode(), twin.encode())})
    with pytest.raises(UnsafePath, match=r"Org/Model: the path .* cannot be used beside"):
        shop.install()


def test_a_name_that_the_disk_does_not_take_is_said(shop: Shop) -> None:
    shop.repo.push({**shop.files, "x" * 300 + ".safetensors": b""})
    with pytest.raises(InstallError, match=r"xxx.*too long"):
        shop.install()


def test_shards_without_an_index_must_be_all_there(shop: Shop) -> None:
    del shop.files["model.safetensors.index.json"]
    shop.repo.push(shop.files)
    shop.install()
    shop.check()
    shutil.rmtree(shop.output)
    del shop.files["model-00002-of-00003.safetensors"]
    shop.repo.push(shop.files)
    with pytest.raises(SwiftletError, match=r"Org/Model: shards 2 of 3"):
        shop.install()


def test_a_stray_shard_is_ignored_with_a_warning(shop: Shop) -> None:
    stray = make_checkpoint(shop.folder / "stray", shards=1, seed=5)
    shop.repo.push({**shop.files, "model-extra.safetensors": stray / "model.safetensors"})
    outline, _ = shop.install()
    assert any(
        "model-extra.safetensors is not in" in text and text.startswith("Org/Model") for text in outline.warnings
    )
    assert shop.hub.body_bytes("model-extra.safetensors") == 0
    shop.check()


def test_a_dense_model_is_sent_to_mlx_lm(shop: Shop) -> None:
    dense = make_checkpoint(shop.folder / "dense", shards=1)
    raw = (dense / "model.safetensors").read_bytes().replace(b"switch_mlp", b"plain_mlps")
    config = {"model_type": "llama", "num_hidden_layers": 2}
    shop.repo.push({"config.json": json.dumps(config).encode(), "model.safetensors": raw})
    with pytest.raises(SwiftletError, match=r"Org/Model: llama has no routed experts.*mlx_lm.chat --model Org/Model"):
        shop.install()
    assert sorted(p.name for p in shop.folder.iterdir()) == ["Model", "dense"]


def test_a_quantization_that_copying_would_lose_is_refused_with_the_command_that_converts(shop: Shop) -> None:
    made = shop.made / "model-00001-of-00003.safetensors"
    raw = made.read_bytes().replace(b".q_proj.scales", b".q_proj.qzeros")
    index = (shop.made / "model.safetensors.index.json").read_bytes().replace(b".q_proj.scales", b".q_proj.qzeros")
    shop.repo.push(
        {**shop.files, made.name: raw, "model.safetensors.index.json": index,
         **{n: Path(shop.made / n).read_bytes().replace(b".q_proj.scales", b".q_proj.qzeros")
            for n in ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")}}
    )  # fmt: skip
    with pytest.raises(SwiftletError, match=r"mlx_lm.convert --hf-path Org/Model --mlx-path Model-mlx"):
        shop.install()


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (Fault("html", "model-00002*"), SourceBroken, "web page"),
        (Fault("pointer", "model-00002*"), SourceBroken, "Git LFS pointer"),
        (Fault("short", "model-00002*", at=30_000), SourceBroken, "only 30000 of"),
        (Fault("etag", "model-00002*", "hub"), SourceChanged, "announces another file"),
        (Fault("status", "model-00002*", "cdn", value=403), AccessDenied, "may not be read"),
        (Fault("status", "model-00002*", value=503), NetworkFailed, "503"),
        (Fault("corrupt", "model-00002*", at=40_000), HashMismatch, "do not have the hash"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else None,
)
def test_what_a_shard_can_answer_is_named_and_the_next_run_continues(
    shop: Shop, fault: Fault, error: type[SwiftletError], words: str
) -> None:
    shop.hub.faults.append(fault)
    with pytest.raises(error, match=words) as caught:
        shop.install()
    assert "model-00002" in str(caught.value)
    assert caught.value.exit_code == 1
    assert not shop.output.exists()
    shop.hub.faults.clear()
    shop.install()
    shop.check()


def test_a_disk_that_fills_up_keeps_what_it_has(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    from swiftlet_repack import places

    true_write, budget = places._pwrite_all, [shop.total() // 2]

    def limited(fd: int, view: memoryview, offset: int) -> None:
        budget[0] -= len(view)
        if budget[0] < 0:
            raise OSError(28, "No space left on device")
        true_write(fd, view, offset)

    with monkeypatch.context() as patch:
        patch.setattr(places, "_pwrite_all", limited)
        with pytest.raises(DiskFull, match="same command"):
            shop.install()
    outline, _ = shop.install()
    shop.check()
    assert outline.resumed
    assert outline.missing_bytes < shop.total() * 0.8


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM], ids=errno.errorcode.get)
def test_a_folder_that_may_not_be_written_is_said_and_nothing_is_fetched(
    shop: Shop, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's refusal is made up, since root may write everywhere."""
    true_mkdir = os.mkdir

    def refuse(path: Any, *args: Any, **options: Any) -> None:
        if str(path).startswith(str(shop.output)):
            raise OSError(code, os.strerror(code), str(path))
        true_mkdir(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(InstallError, match=r"out.qpack.partial.*choose another --output") as caught:
        shop.install()
    assert os.strerror(code) in str(caught.value)
    assert shop.hub.requests == []
    assert sorted(p.name for p in shop.folder.iterdir()) == ["Model"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the test above stands in")
def test_a_folder_without_permission_is_said(shop: Shop) -> None:
    shop.folder.chmod(0o500)
    try:
        with pytest.raises(InstallError, match="another --output"):
            shop.install()
    finally:
        shop.folder.chmod(0o700)


def test_a_disk_that_turns_read_only_keeps_what_it_has(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    true_open, budget = os.open, [6]

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_RDWR and "out.qpack.partial" in str(path) and "journal" not in str(path):
            budget[0] -= 1
            if budget[0] < 0:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return true_open(path, flags, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(SwiftletError, match=r"out.qpack.partial.*Read-only"):
            shop.install()
    assert not shop.output.exists()
    shop.install()
    shop.check()


def test_a_plan_of_another_version_is_not_continued(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.hub.faults.append(Fault("status", "model-00003*", "cdn", value=403, skip=2))
    with pytest.raises(SwiftletError):
        shop.install()
    shop.hub.faults.clear()
    with monkeypatch.context() as patch:
        patch.setattr("swiftlet_repack.plan.DENSE", "elsewhere.safetensors")
        with pytest.raises(NotResumable, match="another version"):
            shop.install()
    shop.install()
    shop.check()


def test_a_checkpoint_on_a_mirror_with_hashes_works_too(hub: LoopbackHub, tmp_path: Path) -> None:
    from fake_checkpoint import put_hashes

    made = make_checkpoint(tmp_path / "Model", shards=2)
    put_hashes(made)
    source = Mirror(hub.mirror("Model", folder_files(made)))
    with Installation(source, tmp_path / "out.qpack", patience=HASTY, pace=SMALL) as work:
        work.look()
        work.carry_out()
    verify(tmp_path / "out.qpack", made)
