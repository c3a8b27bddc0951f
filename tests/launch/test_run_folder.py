from __future__ import annotations

import pytest

from fp8ctl.config.compose import load
from fp8ctl.config.schema import TrainConfig
from fp8ctl.engine.manifest import CheckpointManifest
from fp8ctl.errors import CheckpointError, ConfigError, ModelError
from fp8ctl.launch.run_folder import create_run_folder, resume_run, run_name, settings_for
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import write_status

TINY = ["model=tiny", "data.path=data"]


def settings(overrides=(), run_dir=None, command="train_cpt", resume=False, require_fp8=False) -> TrainConfig:
    return settings_for(command, [*overrides], run_dir=run_dir, resume=resume, require_fp8=require_fp8)


def test_names_say_stage_model_and_recipe() -> None:
    assert run_name(settings(TINY)) == "cpt-tiny-bf16"
    assert run_name(settings([*TINY, "precision=infir2_e5m2_grad"])) == "cpt-tiny-infir2_e5m2_grad"
    assert run_name(settings([*TINY, "name=mine"])) == "mine"


def test_the_written_settings_mean_the_same_from_anywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, paths = create_run_folder(settings(TINY))
    assert paths.root.parent == tmp_path / "runs"
    assert paths.root.name.endswith("-cpt-tiny-bf16")
    stored = load(TrainConfig, paths.config)
    assert stored == config
    assert stored.data.path == str(tmp_path / "data")
    assert stored.run_dir == str(paths.root)


def test_a_started_run_is_never_overwritten(tmp_path) -> None:
    _, paths = create_run_folder(settings(TINY, tmp_path / "r"))
    write_status(paths, "running", step=0)
    with pytest.raises(ConfigError, match="there is a run in") as e:
        settings(TINY, tmp_path / "r")
    assert "--resume" in e.value.hint


def test_a_folder_with_only_settings_runs_from_them(tmp_path) -> None:
    create_run_folder(settings([*TINY, "loop.num_steps=7"], tmp_path / "r"))
    again = settings(["optim.peak_lr=2e-3"], tmp_path / "r")
    assert (again.loop.num_steps, again.optim.peak_lr, again.model.name) == (7, 2e-3, "tiny")
    with pytest.raises(ConfigError, match="groups can't be chosen again"):
        settings(["precision=infir2"], tmp_path / "r")
    with pytest.raises(ConfigError, match="holds a run of stage cpt"):
        settings([], tmp_path / "r", command="train_sft")


def test_resume_needs_a_run_and_a_complete_checkpoint(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--resume needs the run"):
        settings(TINY, resume=True)
    with pytest.raises(ConfigError, match="nothing to resume: no run in"):
        settings([], tmp_path / "r", resume=True)
    create_run_folder(settings(TINY, tmp_path / "r"))
    (tmp_path / "r/checkpoints/step-00000010").mkdir(parents=True)  # no manifest: not complete
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        resume_run(settings([], tmp_path / "r", resume=True))
    for step in (10, 20):
        folder = tmp_path / f"r/checkpoints/step-{step:08d}"
        folder.mkdir(exist_ok=True)
        CheckpointManifest(1, 1, "bf16", {}, {}, {}).write(folder)
    paths, checkpoint = resume_run(settings(["loop.num_steps=99"], tmp_path / "r", resume=True))
    assert checkpoint.name == "step-00000020"
    assert load(TrainConfig, RunPaths(tmp_path / "r").config).loop.num_steps == 99


def test_a_resume_keeps_the_runs_identity(tmp_path) -> None:
    create_run_folder(settings(TINY, tmp_path / "r"))
    with pytest.raises(ConfigError, match="optim.peak_lr, seed can't change when a run is resumed"):
        settings(["optim.peak_lr=1e-3", "seed=3", "loop.num_steps=5"], tmp_path / "r", resume=True)


def test_require_fp8_reaches_the_settings() -> None:
    assert settings([*TINY, "precision=infir2"], require_fp8=True).precision.require_fp8
    with pytest.raises(ConfigError, match="the plan holds none"):
        settings(TINY, require_fp8=True)


def test_a_model_folder_that_is_none_is_named(tmp_path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        settings(["model.path=/nowhere", "data.path=d"])
    with pytest.raises(ModelError, match="holds no model"):
        settings([f"model.path={tmp_path}", "data.path=d"])


def test_a_run_folder_stands_for_its_newest_weights(tmp_path) -> None:
    weights = tmp_path / "stage1/checkpoints/step-00000005/weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    CheckpointManifest(1, 1, "bf16", {}, {}, {}).write(weights.parent)
    (tmp_path / "stage1/config.yaml").write_text("stage: cpt\n")
    assert settings([f"model.path={tmp_path / 'stage1'}", "data.path=d"]).model.path == str(weights)


def test_a_secret_in_the_settings_is_refused_before_anything_is_written(tmp_path) -> None:
    config = settings([*TINY, "track.mlflow_uri='https://me:hunter2@mlflow.example'"], tmp_path / "r")
    with pytest.raises(ConfigError, match="track.mlflow_uri holds a secret") as e:
        create_run_folder(config)
    assert "MLFLOW_TRACKING_USERNAME" in e.value.hint
    assert "hunter2" not in str(e.value)
    assert not (tmp_path / "r").exists()
