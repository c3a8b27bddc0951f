from __future__ import annotations

from pathlib import Path

import pytest

from fp8ctl.config.compose import compose, load
from fp8ctl.config.schema import TrainConfig
from fp8ctl.data.loader import Loader
from fp8ctl.errors import ConfigError
from fp8ctl.launch.length import resolve_length
from fp8ctl.launch.run_folder import create_run_folder, settings_for

TINY = ["model=tiny", "batch.seq_len_tokens=64", "batch.global_batch_rows=4"]


def settings(*overrides: str, run_dir: Path | None = None) -> TrainConfig:
    return settings_for("train_cpt", [*TINY, *overrides], run_dir=run_dir, resume=False, require_fp8=False)


def rows_per_epoch(config: TrainConfig) -> int:
    return Loader(config.data, batch=config.batch, seed=config.seed, rank=0, world_size=1).rows_per_epoch


def test_epochs_become_steps_that_read_every_row_so_often(cpt_data: Path) -> None:
    config = settings(f"data.path={cpt_data}", "loop.num_epochs=3", "schedule.warmup_share=0.1")
    assert (config.loop.num_epochs, config.schedule.warmup_share) == (3, 0.1)
    resolved = resolve_length(config)
    rows = rows_per_epoch(config)
    assert resolved.loop.num_steps == -(-3 * rows // 4)
    assert resolved.schedule.warmup_steps == round(0.1 * resolved.loop.num_steps)
    assert (resolved.loop.num_epochs, resolved.schedule.warmup_share) == (None, None)
    assert resolve_length(resolved) == resolved
    part = resolve_length(settings(f"data.path={cpt_data}", "loop.num_epochs=0.001"))
    assert part.loop.num_steps == 1


def test_whole_steps_do_not_become_one_more_by_rounding(cpt_data: Path) -> None:
    rows = rows_per_epoch(settings(f"data.path={cpt_data}"))
    config = settings(f"data.path={cpt_data}", "loop.num_epochs=5", f"batch.global_batch_rows={rows}")
    assert resolve_length(config).loop.num_steps == 5


def test_the_stored_settings_hold_steps(cpt_data: Path, tmp_path: Path) -> None:
    config = settings(
        f"data.path={cpt_data}", "loop.num_epochs=2", "schedule.warmup_share=0.05", run_dir=tmp_path / "r"
    )
    resolved, paths = create_run_folder(resolve_length(config))
    stored = load(TrainConfig, paths.config)
    assert stored == resolved and stored.loop.num_epochs is None and stored.loop.num_steps > 1


def test_steps_on_the_command_line_win_over_epochs_of_an_experiment() -> None:
    places = ["experiment=infir2_sft1_1_5b", "model.path=null", "data.path=data"]

    def of(*overrides: str) -> TrainConfig:
        return settings_for("train_sft", [*places, *overrides], run_dir=None, resume=False, require_fp8=False)

    config = of("loop.num_steps=40", "schedule.warmup_steps=4")
    assert (config.loop.num_epochs, config.loop.num_steps) == (None, 40)
    assert (config.schedule.warmup_share, config.schedule.warmup_steps) == (None, 4)
    assert of("loop.num_steps=40").schedule.warmup_share == 0.05
    assert resolve_length(of("loop.num_steps=40")).schedule.warmup_steps == 2
    with pytest.raises(ConfigError, match=r"loop.num_steps and loop.num_epochs say the same thing twice") as error:
        of("loop.num_steps=40", "loop.num_epochs=2")
    assert error.value.hint == "give loop.num_steps or loop.num_epochs"


def test_what_does_not_fit(cpt_data: Path) -> None:
    with pytest.raises(ConfigError, match="schedule.warmup_share: schedule.warmup_steps is set too"):
        settings("data.path=d", "schedule.warmup_share=0.1", "experiment=demo_cpt")
    with pytest.raises(ConfigError, match="loop.num_epochs: a mixture has no epochs of its own"):
        settings("data.sources=[{path: a}, {path: b}]", "loop.num_epochs=2")
    config = settings(f"data.path={cpt_data}", "loop.num_epochs=1", "schedule.decay_steps=100000")
    with pytest.raises(ConfigError, match=r"decay 100000 steps are more than loop\.num_steps = \d+"):
        resolve_length(config)
    assert compose("train_cpt", ["loop.num_epochs=0.5"]).loop.num_epochs == 0.5
    for bad in ("0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=r"loop\.num_epochs"):
            compose("train_cpt", [f"loop.num_epochs={bad}"])
