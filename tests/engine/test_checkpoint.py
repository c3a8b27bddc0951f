"""Saving, loading and everything that goes wrong with it, in one process (two ranks: test_ranks.py)."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from engine_cases import DTYPES, SHAPE, STAGES, make_engine, run_step, same_weights, settings, write_weights

from fp8ctl.engine import checkpoint
from fp8ctl.engine.checkpoint import latest, load_checkpoint, save_checkpoint
from fp8ctl.engine.engine import Engine
from fp8ctl.engine.manifest import CheckpointManifest, FileEntry, digest
from fp8ctl.errors import CheckpointError, ModelError

everywhere = pytest.mark.parametrize(("stage", "dtype"), [(s, d) for d in DTYPES for s in STAGES])


def save(engine: Engine, folder: Path, **given: Any) -> None:
    arguments: dict[str, Any] = {"client_state": {"step": 1}, "rank_state": {}, "write_weights": write_weights}
    save_checkpoint(engine, folder, **{**arguments, **given})


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    manifest = CheckpointManifest.read(folder)
    raw = {**manifest.__dict__, **changes}
    CheckpointManifest(**raw).write(folder)


@everywhere
def test_resume_is_exact(stage: int, dtype: str, tmp_path: Path) -> None:
    config, folder = settings(stage, dtype), tmp_path / "run [1]*" / "step-00000006"  # a name that is no glob pattern
    engine, straight = make_engine(config), []
    for step in range(8):
        if step == 6:
            save(engine, folder)
        straight.append(run_step(engine, config, step))
    weights = engine.gather_weights()
    engine.close()

    engine = make_engine(config, seed=99)
    assert load_checkpoint(engine, folder) == ({"step": 1}, {})
    assert [run_step(engine, config, step) for step in (6, 7)] == straight[6:]
    assert same_weights(engine.gather_weights(), weights)
    engine.close()


@pytest.fixture(scope="module")
def engine() -> Any:
    config = settings(2, "bf16")
    made = make_engine(config)
    run_step(made, config, 0)
    yield made
    made.close()


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "step-00000001"
    save(engine, folder, client_state={"step": 1, "shape": SHAPE.model_dump(mode="json")})
    return folder


def test_what_is_in_a_checkpoint(engine: Engine, saved: Path) -> None:
    assert sorted(str(p.relative_to(saved)) for p in saved.rglob("*") if p.is_file()) == [
        "client_state.json",
        "deepspeed/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "deepspeed/mp_rank_00_model_states.pt",
        "manifest.json",
        "ranks/rank-00000.pt",
        "weights/weights.pt",
    ]
    manifest = CheckpointManifest.read(saved)
    assert (manifest.world_size, manifest.zero_stage, manifest.dtype) == (1, 2, "bf16")
    assert manifest.parameters["model.norm.weight"] == [32]
    assert set(manifest.versions) == {"torch", "deepspeed"}
    for name, entry in manifest.files.items():
        assert entry == digest(saved / name)
    assert os.listdir(saved.parent) == [saved.name]
    assert latest(saved.parent) == saved
    weights = torch.load(saved / "weights" / "weights.pt")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert same_weights(weights, engine.gather_weights(torch.bfloat16))


def test_random_state_travels(engine: Engine, tmp_path: Path) -> None:
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "n": {"x": 1.5},
    }
    expected = (torch.rand(3), random.random(), numpy.random.rand(3))
    save(engine, tmp_path / "step-00000001", rank_state=state)
    _, loaded = load_checkpoint(engine, tmp_path / "step-00000001")
    torch.set_rng_state(loaded["torch"])
    random.setstate(loaded["python"])
    numpy.random.set_state(loaded["numpy"])
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert (numpy.random.rand(3) == expected[2]).all()
    assert loaded["n"] == {"x": 1.5}


def test_a_checkpoint_of_the_same_step_is_replaced(engine: Engine, saved: Path) -> None:
    save(engine, saved, client_state={"step": 1, "again": True})
    assert json.loads((saved / "client_state.json").read_text())["again"] is True
    assert os.listdir(saved.parent) == [saved.name]


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours handles it."""


@pytest.mark.parametrize(
    "name", ["torch.save", "json.dumps", "fp8ctl.engine.checkpoint.digest", "json.dump", "os.rename"]
)
def test_a_save_that_is_killed_leaves_the_older_one(
    engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def kill(*_args: Any, **_kwargs: Any) -> None:
        raise Killed

    newer = saved.with_name("step-00000002")
    with monkeypatch.context() as patch:
        patch.setattr(name, kill)
        with pytest.raises(Killed):
            save(engine, newer)
    assert sorted(os.listdir(saved.parent)) == [".step-00000002.tmp", "step-00000001"]
    assert latest(saved.parent) == saved
    save(engine, newer)
    assert latest(saved.parent) == newer
    assert sorted(os.listdir(saved.parent)) == ["step-00000001", "step-00000002"]


FULL = ("the disk is full", "free some space or lower loop.keep_checkpoints")
LOCKED = ("PermissionError: [Errno 13] Permission denied", "make the run folder writable")


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), *FULL),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), *FULL),
        (PermissionError(errno.EACCES, "Permission denied"), *LOCKED),
    ],
)
@pytest.mark.parametrize("place", ["_save", "digest", "_publish", "_make_room"])
def test_disk_errors(
    engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str, hint: str, place: str
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, place, fail)
        with pytest.raises(CheckpointError) as raised:
            save(engine, saved.with_name("step-00000002"))
    assert raised.value.message == f"could not save step-00000002: {message}"
    assert raised.value.hint == f"{hint}; older checkpoints are untouched"
    assert os.listdir(saved.parent) == ["step-00000001"]
    run_step(engine, settings(2, "bf16"), 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_disk_that_is_really_full(engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = checkpoint._save
    monkeypatch.setattr(checkpoint, "_save", lambda value, _path: usual(value, "/dev/full"))
    with pytest.raises(CheckpointError) as raised:
        save(engine, saved.with_name("step-00000002"))
    assert raised.value.message == "could not save step-00000002: the disk is full"
    assert os.listdir(saved.parent) == ["step-00000001"]


def test_too_little_space_is_seen_before_anything_is_written(
    engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(CheckpointError) as raised:
        save(engine, saved.with_name("step-00000002"))
    assert raised.value.message == (
        "could not save step-00000002: the disk has 0.0001 GB free, a checkpoint takes about 0.000332 GB"
    )
    assert os.listdir(saved.parent) == ["step-00000001"]


def test_an_error_of_the_writer_keeps_its_words(engine: Engine, saved: Path) -> None:
    def refuse(_weights: Any, _folder: Path) -> None:
        raise ModelError("no tokenizer", "give one")

    with pytest.raises(CheckpointError) as raised:
        save(engine, saved.with_name("step-00000002"), write_weights=refuse)
    assert (raised.value.message, raised.value.hint) == ("could not save step-00000002: no tokenizer", "give one")


def load_into(stage: int, dtype: str, folder: Path, **given: Any) -> CheckpointError:
    other = make_engine(settings(stage, dtype), **given)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(other, folder)
    other.close()
    return raised.value


def test_another_engine_is_refused(saved: Path) -> None:
    anew = f"or start a new run from its weights with model.path={saved}/weights"
    error = load_into(1, "bf16", saved)
    assert error.message == f"{saved} was saved at ZeRO stage 2, this run is at ZeRO stage 1"
    assert error.hint == f"resume with engine.zero_stage=2, {anew}"
    error = load_into(2, "fp32", saved)
    assert error.message == f"{saved} was saved in bf16, this run is in fp32"
    assert error.hint == f"resume with engine.dtype=bf16, {anew}"
    rewrite_manifest(saved, world_size=4)
    error = load_into(2, "bf16", saved)
    assert error.message == f"{saved} was saved on 4 ranks, this run is on 1 ranks"
    assert error.hint == f"resume with launch.num_ranks=4, {anew}"


def test_another_model_is_refused(engine: Engine, saved: Path) -> None:
    wider = SHAPE.model_copy(update={"ffn_size": 96})
    error = load_into(2, "bf16", saved, shape=wider)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert error.message == f"{saved} belongs to another model: {name} is [64, 32] there and [96, 32] here"
    assert error.hint == "resume with the model it was saved from"
    deeper = SHAPE.model_copy(update={"num_layers": 3})
    assert "model.layers.2.input_layernorm.weight is absent there" in load_into(2, "bf16", saved, shape=deeper).message
    shallower = SHAPE.model_copy(update={"num_layers": 1})
    assert (
        "model.layers.1.input_layernorm.weight is [32] there and absent here"
        in load_into(2, "bf16", saved, shape=shallower).message
    )

    shape = SHAPE.model_dump(mode="json")
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(engine, saved, shape={**shape, "rope_base": 5e5})
    assert raised.value.message == f"{saved} belongs to another model: rope_base is 10000.0 there and 500000.0 here"
    load_checkpoint(engine, saved, shape={**shape, "max_positions": 7})


def test_damage_is_found_before_anything_is_loaded(
    engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("unpickled a damaged file")

    monkeypatch.setattr(torch, "load", never)
    file = saved / "deepspeed" / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 16
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(engine, saved)
    assert raised.value.message == f"{saved} is damaged: the checksum of deepspeed/mp_rank_00_model_states.pt differs"
    assert raised.value.hint == "resume from an older checkpoint: move this folder away"
    file.unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: deepspeed/mp_rank_00_model_states.pt: No such file"):
        load_checkpoint(engine, saved)
    with pytest.raises(CheckpointError, match="is no complete checkpoint: it has no manifest.json"):
        load_checkpoint(engine, saved.parent / "step-00000077")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("name", ["ranks/rank-00000.pt", "deepspeed/mp_rank_00_model_states.pt"])
def test_code_in_a_checkpoint_is_not_run(
    engine: Engine, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module": Bomb()}, saved / name)
    manifest = CheckpointManifest.read(saved)
    forged: dict[str, FileEntry] = {**manifest.files, name: digest(saved / name)}
    rewrite_manifest(saved, files=forged)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(engine, saved)
    assert raised.value.message == f"{saved / name} holds what no checkpoint of this version holds, and was not loaded"
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("do not trust the file if it came from someone else")
    assert not (tmp_path / "exploded").exists()
