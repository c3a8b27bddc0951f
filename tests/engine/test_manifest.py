"""Which folders count as checkpoints."""

import json
from pathlib import Path

import pytest

from fp8ctl.engine.manifest import (
    MANIFEST,
    CheckpointManifest,
    check_contents,
    check_sizes,
    digest,
    is_complete,
    latest,
    prune,
)
from fp8ctl.errors import CheckpointError

OLDER = "resume from an older checkpoint: move this folder away"


def make(folder: Path, *, world_size: int = 1) -> CheckpointManifest:
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "states.pt").write_bytes(b"0123456789" * 1000)
    (folder / "client_state.json").write_text("{}")
    names = ["client_state.json", "deepspeed/states.pt"]
    files = {name: digest(folder / name, sync=True) for name in names}
    manifest = CheckpointManifest(world_size, 1, "bf16", {"w": [2, 3]}, {"torch": "2"}, files)
    manifest.write(folder)
    return manifest


def test_round_trip(tmp_path: Path) -> None:
    manifest = make(tmp_path / "step-00000001")
    assert CheckpointManifest.read(tmp_path / "step-00000001") == manifest
    assert manifest.files["deepspeed/states.pt"].bytes == 10_000
    check_sizes(tmp_path / "step-00000001", manifest)
    check_contents(tmp_path / "step-00000001", manifest, list(manifest.files))


def test_a_folder_without_manifest_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        CheckpointManifest.read(tmp_path)
    assert error.value.message == f"{tmp_path} is no complete checkpoint: it has no manifest.json"
    assert error.value.hint == OLDER


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "files": {"a": 3}}', "null"])
def test_a_damaged_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    make(tmp_path / "c")
    (tmp_path / "c" / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError) as error:
        CheckpointManifest.read(tmp_path / "c")
    assert error.value.message.startswith(f"{tmp_path / 'c' / MANIFEST} is damaged: ")
    assert not is_complete(tmp_path / "c")


def test_a_manifest_of_the_future_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "c")
    raw = json.loads((tmp_path / "c" / MANIFEST).read_text())
    (tmp_path / "c" / MANIFEST).write_text(json.dumps({**raw, "schema": 2}))
    with pytest.raises(CheckpointError) as error:
        CheckpointManifest.read(tmp_path / "c")
    assert error.value.message == f"{tmp_path / 'c'} has checkpoint schema 2, this version reads 1"
    assert error.value.hint == "use the version that wrote it"


def test_sizes(tmp_path: Path) -> None:
    manifest = make(tmp_path / "c")
    states = tmp_path / "c" / "deepspeed" / "states.pt"
    states.write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"is damaged: deepspeed/states.pt has 5 bytes instead of 10,000"):
        check_sizes(tmp_path / "c", manifest)
    states.unlink()
    with pytest.raises(CheckpointError, match="is damaged: deepspeed/states.pt: No such file or directory"):
        check_sizes(tmp_path / "c", manifest)


@pytest.mark.parametrize("position", [0, 5000, 9999])
def test_one_flipped_bit_is_found(tmp_path: Path, position: int) -> None:
    manifest = make(tmp_path / "c")
    states = tmp_path / "c" / "deepspeed" / "states.pt"
    content = bytearray(states.read_bytes())
    content[position] ^= 1
    states.write_bytes(content)
    assert is_complete(tmp_path / "c")  # sizes alone can't tell
    with pytest.raises(CheckpointError, match="the checksum of deepspeed/states.pt differs"):
        check_contents(tmp_path / "c", manifest, list(manifest.files))


def test_latest_passes_over_what_is_not_complete(tmp_path: Path) -> None:
    assert latest(tmp_path / "nothing") is None
    assert latest(tmp_path) is None
    for step in (5, 10, 100):
        make(tmp_path / f"step-{step:08d}")
    make(tmp_path / ".step-00000200.tmp")
    (tmp_path / "step-00000300").write_text("a file")
    assert latest(tmp_path) == tmp_path / "step-00000100"
    (tmp_path / "step-00000100" / "client_state.json").write_text("")
    assert latest(tmp_path) == tmp_path / "step-00000010"
    (tmp_path / "step-00000010" / MANIFEST).unlink()
    assert latest(tmp_path) == tmp_path / "step-00000005"


def test_prune_keeps_the_newest_and_what_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make(tmp_path / f"step-{step:08d}")
    make(tmp_path / ".step-00000009.tmp")
    (tmp_path / "step-00000001" / "client_state.json").write_text("damaged")
    gone = prune(tmp_path, keep=2)
    assert [p.name for p in gone] == ["step-00000002", ".step-00000009.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003", "step-00000004"]
    assert prune(tmp_path, keep=2) == []


def test_prune_that_is_interrupted_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        make(tmp_path / f"step-{step:08d}")
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
    prune(tmp_path, keep=1)
    assert (tmp_path / "step-00000001").exists()
    assert not is_complete(tmp_path / "step-00000001")
