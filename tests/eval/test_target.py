"""Finding the weights: runs, checkpoints, plain folders, and what is said when there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8ctl.engine.manifest import CheckpointManifest
from fp8ctl.errors import ConfigError, Fp8ctlError, ModelError
from fp8ctl.eval.target import Target, find_target, fingerprint
from fp8ctl.paths import RunPaths


def make_weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w")
    return folder


def make_run(root: Path, *, complete: tuple[int, ...] = (), torn: tuple[int, ...] = ()) -> RunPaths:
    paths = RunPaths(root)
    root.mkdir()
    paths.config.write_text("stage: cpt\n")
    for step in complete + torn:
        make_weights(paths.checkpoint(step) / "weights")
    for step in complete:
        CheckpointManifest(1, 1, "bf16", {}, {}, {}).write(paths.checkpoint(step))
    return paths


def test_run_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", complete=(50, 100), torn=(150,))
    assert find_target(str(paths.root)) == Target(paths.checkpoint(100) / "weights", paths.root, 100)


def test_checkpoint_and_its_weights_belong_to_their_run(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", complete=(50, 100))
    expected = Target(paths.checkpoint(50) / "weights", paths.root, 50)
    assert find_target(str(paths.checkpoint(50))) == find_target(str(paths.checkpoint(50) / "weights")) == expected


def test_plain_folder_belongs_to_no_run(tmp_path: Path) -> None:
    folder = make_weights(tmp_path / "weights")
    assert find_target(str(folder)) == Target(folder, None, None)


def test_checkpoint_outside_of_a_run_keeps_its_step(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", complete=(50,))
    paths.config.unlink()
    assert find_target(str(paths.checkpoint(50))) == Target(paths.checkpoint(50) / "weights", None, 50)


def test_fingerprint_sees_weights_and_tokenizer_and_not_the_readme(tmp_path: Path) -> None:
    folder = make_weights(tmp_path / "m")
    first = fingerprint(folder)
    (folder / "README.md").write_text("words")
    assert fingerprint(folder) == first
    (folder / "tokenizer.json").write_text("{}")
    second = fingerprint(folder)
    (folder / "model.safetensors").write_bytes(b"v")
    assert len({first, second, fingerprint(folder)}) == 3


def check(error: type[Fp8ctlError], model: str | None, message: str, hint: str) -> None:
    with pytest.raises(error) as caught:
        find_target(model)
    assert message in caught.value.message and hint in (caught.value.hint or "")
    assert caught.value.exit_code == 2


def test_what_is_said_when_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    check(ConfigError, None, "no model to evaluate", "model=RUN")
    check(ModelError, str(tmp_path / "absent"), "absent does not exist", "give a run folder")
    (tmp_path / "empty").mkdir()
    check(ModelError, str(tmp_path / "empty"), "empty holds no model", "a Hugging Face folder")
    paths = make_run(tmp_path / "run", torn=(7,))
    check(ModelError, str(paths.root), "no complete checkpoint in", "loop.save_every_steps")
    check(ModelError, str(paths.checkpoint(7)), "step-00000007 is incomplete", "give the run folder")
