"""A model's name finds what is on this machine, whole, in any letter case; or says what is wrong and what to
run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from fake_checkpoint import make_checkpoint, make_container

from swiftlet_mlx.errors import ModelNotFound
from swiftlet_mlx.library import cached, delete, hub_cache, installed, matching, models_folder, one
from swiftlet_mlx.locate import find_model

COMMIT = "c0ffee" + "0" * 34


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def put_container(name: str, source: str = "", folder: Path | None = None) -> Path:
    return make_container((folder or models_folder()) / name, side=2, source=source)


def put_cached(name: str, *, ref: str | None = "main", commit: str = COMMIT) -> Path:
    """A checkpoint as huggingface_hub keeps it: blobs, links, refs."""
    root = hub_cache() / f"models--{name.replace('/', '--')}"
    source = make_checkpoint(root.parent / "made")
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    for file in source.iterdir():
        blob = root / "blobs" / f"{commit[:4]}{file.name}"
        file.rename(blob)
        os.symlink(os.path.relpath(blob, snapshot), snapshot / file.name)
    shutil.rmtree(source)
    if ref:
        (root / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (root / "refs" / ref).write_text(commit)
    return snapshot


def test_nothing_here_is_an_empty_list() -> None:
    assert installed() == []
    assert cached() == []
    assert matching("Org/Model") == []


@pytest.mark.parametrize("name", ["Model", "Model.qpack", "model", "MODEL.qpack", "Org/Source", "org/source"])
def test_a_container_is_found_by_its_name_and_by_its_source(name: str) -> None:
    path = put_container("Model.qpack", "Org/Source")
    assert find_model(name) == path


@pytest.mark.parametrize("name", ["Org/Model", "org/MODEL"])
def test_a_checkpoint_in_the_hub_cache_is_used_as_it_is_in_any_letter_case(name: str) -> None:
    snapshot = put_cached("Org/Model")
    assert find_model(name) == snapshot


def test_a_container_made_from_a_cached_checkpoint_comes_before_it() -> None:
    put_cached("Org/Model")
    path = put_container("Model.qpack", "Org/Model")
    assert find_model("Org/Model") == path


def test_a_ready_container_in_the_hub_cache_is_found() -> None:
    snapshot = hub_cache() / "models--Org--Model-qpack" / "snapshots"
    path = put_container(COMMIT, folder=snapshot)
    assert find_model("Org/Model-qpack") == path


def test_a_path_comes_before_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_container("Model.qpack")
    (tmp_path / "Model").mkdir()
    (tmp_path / "Model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_model("Model") == Path("Model")


def test_revisions_in_the_cache_are_told_apart() -> None:
    main = put_cached("Org/Model")
    beta = put_cached("Org/Model", ref="v2/beta", commit="b" * 40)
    assert find_model("Org/Model") == main
    assert find_model("Org/Model", revision="v2/beta") == beta
    assert find_model("Org/Model", revision="b" * 40) == beta
    with pytest.raises(ModelNotFound):
        find_model("Org/Model", revision="v3")


def test_a_download_with_a_missing_shard_is_reported_not_used() -> None:
    snapshot = put_cached("Org/Model")
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"incomplete.*model-00002-of-00002.*hf download Org/Model"):
        find_model("org/model")


def test_an_unfinished_installation_is_reported_not_used() -> None:
    put_container("Model.qpack.partial")
    with pytest.raises(ModelNotFound, match=r"not finished; repeat the command"):
        find_model("Model")
    assert [f.kind for f in installed()] == ["unfinished"]


def test_a_damaged_container_is_reported_with_its_damage() -> None:
    path = put_container("Model.qpack")
    os.truncate(path / "packed_experts/layer_01.bin", 100)
    with pytest.raises(ModelNotFound, match=r"layer_01.bin has 100 bytes"):
        find_model("Model")


def test_two_containers_of_one_source_must_be_named() -> None:
    put_container("A.qpack", "Org/Model")
    b = put_container("B.qpack", "Org/Model")
    with pytest.raises(ModelNotFound, match="A, B"):
        find_model("Org/Model")
    assert find_model("B") == b


@pytest.mark.parametrize(("typed", "near"), [("Qwen3-Nxt", "Qwen3-Next"), ("other/Qwen3-Next", "Qwen3-Next")])
def test_a_misspelt_name_gets_the_nearest_one(typed: str, near: str) -> None:
    put_container(f"{near}.qpack")
    with pytest.raises(ModelNotFound, match=f"Did you mean {near}"):
        find_model(typed)


def test_an_unknown_name_gets_the_command_that_installs_it() -> None:
    with pytest.raises(ModelNotFound, match=r"repack --from-hf Org/Name`"):
        find_model("Org/Name")
    with pytest.raises(ModelNotFound, match=r"swiftlet-mlx list"):
        find_model("whatever")


def test_dense_models_and_rubbish_in_the_cache_are_not_listed() -> None:
    dense = put_cached("Org/Dense")
    (dense / "config.json").unlink()
    (dense / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    (hub_cache() / "datasets--x--y").mkdir()
    (hub_cache() / "models--x--y").mkdir()
    put_cached("Org/Model")
    assert [(f.name, f.kind, f.revision) for f in cached()] == [("Org/Model", "checkpoint", "main")]
    assert cached()[0].nbytes > 50_000


def test_what_is_deleted_is_gone_and_nothing_else() -> None:
    keep = put_container("Keep.qpack")
    gone = put_container("Gone.qpack")
    size = sum(f.stat().st_size for f in gone.rglob("*") if f.is_file())
    assert delete(one("gone")) == size
    assert (keep.exists(), gone.exists()) == (True, False)
    put_container("Half.qpack.partial")
    delete(one("Half"))
    assert [f.name for f in installed()] == ["Keep"]


def test_a_cached_model_is_deleted_with_its_blobs() -> None:
    put_cached("Org/Model")
    put_cached("Org/Other")
    assert delete(one("org/model")) > 50_000
    assert [f.name for f in cached()] == ["Org/Other"]
    assert not (hub_cache() / "models--Org--Model").exists()


def test_a_name_that_means_two_models_deletes_neither() -> None:
    put_cached("Org/Model")
    path = put_container("Model.qpack", "Org/Model")
    with pytest.raises(ModelNotFound, match="more than once"):
        one("Org/Model")
    assert one(str(path)).path == path
    with pytest.raises(ModelNotFound, match="no model 'nothing'"):
        one("nothing")
