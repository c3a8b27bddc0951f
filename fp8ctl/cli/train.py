"""fp8ctl train ..."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fp8ctl.cli.console import say, stderr, stdout
from fp8ctl.cli.options import DryRun, Overrides, RunDir

app = typer.Typer(help="Train: continual pre-training and supervised fine-tuning.", no_args_is_help=True)
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --run-dir from its newest complete checkpoint.")
]
RequireFp8 = Annotated[bool, typer.Option("--require-fp8", help="Fail when less ran in FP8 than the plan says.")]


def _add(stage: str, description: str) -> None:
    @app.command(
        stage, help=f"{description}: fp8ctl train {stage} model.path=FOLDER data.path=FOLDER precision=infir2."
    )
    def command(
        overrides: Overrides = None,
        run_dir: RunDir = None,
        dry_run: DryRun = False,
        resume: Resume = False,
        require_fp8: RequireFp8 = False,
    ) -> None:
        _train(f"train_{stage}", overrides or [], run_dir, dry_run, resume, require_fp8)


_add("cpt", "Continual pre-training")
_add("sft", "Supervised fine-tuning")


def _train(
    command: str, overrides: list[str], run_dir: Path | None, dry_run: bool, resume: bool, require_fp8: bool
) -> None:
    from fp8ctl.launch.dry_run import describe_run
    from fp8ctl.launch.job import run_job
    from fp8ctl.launch.length import resolve_length
    from fp8ctl.launch.progress import TrainProgress
    from fp8ctl.launch.run_folder import check_data_order, check_inputs, create_run_folder, resume_run, settings_for
    from fp8ctl.paths import shown_path

    config = resolve_length(settings_for(command, overrides, run_dir=run_dir, resume=resume, require_fp8=require_fp8))
    if dry_run:
        stdout().print(describe_run(config))
        return
    for warning in check_inputs(config):
        say(f"warning: {warning}")
    if resume:
        check_data_order(config)
        paths, checkpoint = resume_run(config)
    else:
        config, paths = create_run_folder(config)
        checkpoint = None
    folder = shlex.quote(shown_path(paths.root))
    say(f"run folder: {folder}")
    with TrainProgress(config, paths, stderr()) as progress:
        code = run_job(config, paths, resume_from=checkpoint, on_poll=progress.poll)
    if code:
        say(f"stopped by a signal; continue with: fp8ctl train {config.stage} --resume --run-dir {folder}")
        raise typer.Exit(code)
    say(f"finished; see it with: fp8ctl report {folder}")
