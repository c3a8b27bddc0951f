from __future__ import annotations

from pathlib import Path

from fp8ctl.paths import RunPaths, conf_dir, shown_path, templates_dir


def test_paths_below_the_working_directory_are_shown_as_they_were_typed(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "runs" / "a") == "runs/a"
    assert shown_path("runs/a") == "runs/a"
    assert shown_path("/elsewhere/a") == "/elsewhere/a"


def test_bundled_folders_are_found() -> None:
    assert (conf_dir() / "train_cpt.yaml").is_file()
    assert (templates_dir() / "chat" / "smollm2.jinja").is_file()


def test_names_in_a_run_folder() -> None:
    paths = RunPaths("r")
    assert paths.checkpoint(100) == Path("r/checkpoints/step-00000100")
    assert paths.rank_log(3) == Path("r/logs/rank-3.log")
