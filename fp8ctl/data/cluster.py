"""A preparation on more than one machine: datatrove's executors run the tasks, the folder they share puts them together.

Each job takes every n-th task of the plan that lies in the folder; a task that has its marker is left out, so a job that is
started again does only what is missing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from fp8ctl.data.plan import Plan
from fp8ctl.data.prep_task import Done, run_task
from fp8ctl.errors import Fp8ctlError, LaunchError, MissingPackageError

try:
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise MissingPackageError(
        f"executors other than local need datatrove: {error}", "pip install 'fp8ctl[cluster]'"
    ) from None

LOGS = "logs"
"""Folder beside the shards where datatrove writes what its jobs say."""


class PrepTasks(PipelineStep):
    """Runs every `world_size`-th task of a plan, from number `rank` on, unless it is done."""

    name = "fp8ctl data prep"
    type = "TOKENIZER"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """One job; gives no documents."""
        folder = Path(self.folder)
        plan = Plan.read(folder)
        # one process, one core, as in the command's own processes
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for task in plan.tasks[rank::world_size]:
            done = Done.read(folder, task.number, plan.fingerprint)
            if done is None:
                done = run_task(task, lambda update: None, config=plan.config, plan=plan.fingerprint, folder=folder)
            self.stat_update("documents", value=done.counts.documents, unit="task")
            self.stat_update("tokens", value=done.counts.tokens, unit="task")
        yield from ()


class Finish(PipelineStep):
    """Writes the manifest of a data set whose tasks are done."""

    name = "fp8ctl data merge"
    type = "WRITER"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """The one job."""
        from fp8ctl.data.prepare import finish

        finish(Path(self.folder))
        yield from ()


def run_on_cluster(plan: Plan, folder: Path) -> None:
    """Runs all tasks with datatrove's local or Ray executor and waits for them.

    Raises:
        DataError, ConfigError: what a task raised.
        LaunchError: the executor failed.
        MissingPackageError: Ray is not installed.
    """
    options: dict[str, Any] = {
        "pipeline": [PrepTasks(str(folder))],
        "tasks": _num_jobs(plan),
        "logging_dir": str(folder / LOGS),
        "skip_completed": False,  # our own markers say what is done
    }
    try:
        if plan.config.executor == "ray":
            from datatrove.executor.ray import RayPipelineExecutor

            cluster = plan.config.cluster
            RayPipelineExecutor(
                **options,
                workers=cluster.max_running_jobs or -1,
                cpus_per_task=cluster.cpus_per_job,
                mem_per_cpu_gb=cluster.mem_per_cpu_gb,
            ).run()
        else:
            from datatrove.executor.local import LocalPipelineExecutor

            LocalPipelineExecutor(**options, workers=plan.config.num_workers, start_method="spawn").run()
    except Fp8ctlError:
        raise
    except ImportError as error:
        raise MissingPackageError(f"executor=ray needs Ray: {error}", "pip install 'datatrove[ray]'") from None
    except Exception as error:
        raise LaunchError(
            f"datatrove's executor failed: {error}", f"see {folder / LOGS}, then run the command again"
        ) from error


def submit_to_slurm(plan: Plan, folder: Path) -> str:
    """Submits the tasks as an array of jobs and a job after them that writes the manifest; returns that one's number.

    Raises:
        LaunchError: there is no Slurm here, or it refuses.
    """
    from datatrove.executor.slurm import SlurmPipelineExecutor

    cluster = plan.config.cluster
    folder = folder.absolute()
    common: dict[str, Any] = {
        "time": cluster.time_limit,
        "partition": cluster.partition,
        "cpus_per_task": cluster.cpus_per_job,
        "mem_per_cpu_gb": cluster.mem_per_cpu_gb,
        "env_command": cluster.env_command or f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        "sbatch_args": {name: value for name, _, value in (a.partition("=") for a in cluster.sbatch_args)},
        "skip_completed": False,
        "qos": "",
    }
    tasks = SlurmPipelineExecutor(
        [PrepTasks(str(folder))],
        tasks=_num_jobs(plan),
        workers=cluster.max_running_jobs or -1,
        job_name="fp8ctl-data-prep",
        logging_dir=str(folder / LOGS),
        **common,
    )
    last = SlurmPipelineExecutor(
        [Finish(str(folder))],
        tasks=1,
        depends=tasks,
        job_name="fp8ctl-data-merge",
        logging_dir=str(folder / LOGS / "merge"),
        **common,
    )
    try:
        last.run()
    except FileNotFoundError:
        raise LaunchError("there is no sbatch here", "run this on a machine that submits to Slurm") from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(
            f"sbatch failed: {(error.stderr or error.output or str(error)).strip()}",
            f"see {folder / LOGS / 'launch_script.slurm'} and the settings cluster.*",
        ) from None
    return str(last.job_id)


def _num_jobs(plan: Plan) -> int:
    return min(plan.config.cluster.num_jobs or len(plan.tasks), len(plan.tasks))
