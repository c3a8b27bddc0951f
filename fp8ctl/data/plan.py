"""What a preparation is going to do, written into its folder before it begins, so that another command can go on with it."""

from __future__ import annotations

import importlib.metadata
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

import fp8ctl
from fp8ctl.config.data_schema import DataPrepConfig
from fp8ctl.data.encode import Encoder
from fp8ctl.data.exclude import check_lists
from fp8ctl.data.prep_task import TASKS
from fp8ctl.data.sources import InputFile, Slice
from fp8ctl.data.stdlib_text import python_version
from fp8ctl.data.tasks import Task, input_sizes, plan_tasks
from fp8ctl.errors import DataError
from fp8ctl.track.record import write_json

FILE = f"{TASKS}/plan.json"
_NOT_IN_THE_DATA = {"out", "num_workers", "max_bad_rate", "restart", "executor", "cluster"}
"""Settings that change no byte of the shards: a preparation may go on with other ones."""


@dataclass(frozen=True)
class Plan:
    """The tasks of a preparation and all that their result depends on."""

    config: DataPrepConfig
    tasks: list[Task]
    prepared: dict[str, Any]
    """What the manifest keeps: settings, versions, hash of the chat template."""
    modified: dict[str, int]
    """Time of last change (ns) of each local input file, to notice one that changes meanwhile."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the shards depend on."""
        content = {
            "prepared": self.prepared,
            "tasks": [asdict(task) for task in self.tasks],
            "modified": self.modified,
            "fp8ctl": fp8ctl.__version__,
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    @property
    def bytes(self) -> int:
        """Size of all input files."""
        return sum(task.bytes for task in self.tasks)

    def write(self, folder: Path) -> None:
        """Writes it into the folder of the data set, atomically."""
        value = {
            "fingerprint": self.fingerprint,
            "config": self.config.model_dump(mode="json"),
            "prepared": self.prepared,
            "tasks": [asdict(task) for task in self.tasks],
            "modified": self.modified,
        }
        write_json(folder / FILE, value)

    @staticmethod
    def read(folder: Path) -> Plan:
        """The plan of an unfinished data set.

        Raises:
            DataError: there is none.
        """
        try:
            value = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{folder} holds no unfinished data set", f"begin one with `fp8ctl data prep out={folder}`"
            ) from None
        return Plan(
            config=DataPrepConfig.model_validate(value["config"]),
            tasks=[_task(t) for t in value["tasks"]],
            prepared=value["prepared"],
            modified=value["modified"],
        )


def make_plan(config: DataPrepConfig, encoder: Encoder) -> Plan:
    """Finds the input and cuts it into tasks.

    Raises:
        DataError: a path matches nothing, or an exclusion list does not fit the input.
    """
    tasks = plan_tasks(config.sources, config.task_mb * 2**20 if config.task_mb is not None else None)
    prepared = config.model_dump(mode="json", exclude=_NOT_IN_THE_DATA)
    prepared["tokenizer_fingerprint"] = encoder.tokenizer.fingerprint
    prepared["versions"] = _versions(config)
    if config.exclude:
        prepared["exclude"] = check_lists(config.exclude, input_sizes(tasks, config.sources))
    if encoder.template is not None:
        prepared["chat_template_hash"] = xxhash.xxh3_128_hexdigest(encoder.template.source.encode())
    return Plan(config, tasks, prepared, _modified(tasks))


def refuse_changed_input(plan: Plan) -> None:
    """Raises DataError when a file is no longer what it was when the plan was made."""
    now = _modified(plan.tasks)
    for path, modified in plan.modified.items():
        if now.get(path) != modified:
            what = "changed" if path in now else "vanished"
            raise DataError(
                f"{path} {what} while the data was prepared",
                "leave the input alone, and begin again with restart=true",
            )


def _modified(tasks: list[Task]) -> dict[str, int]:
    paths = sorted({piece.file.path for task in tasks for piece in task.slices})
    return {path: os.stat(path).st_mtime_ns for path in paths if os.path.exists(path)}


def _task(value: dict[str, Any]) -> Task:
    slices = tuple(Slice(InputFile(**s.pop("file")), **s) for s in value.pop("slices"))
    return Task(slices=slices, **value)


def _versions(config: DataPrepConfig) -> dict[str, str]:
    """Versions of what the content depends on."""
    kinds = {source.kind for source in config.sources}
    versions = {"tokenizers": importlib.metadata.version("tokenizers")}
    if "python_stdlib" in kinds:
        versions["python"] = python_version()
    if "reasoning_gym" in kinds:
        versions["reasoning-gym"] = importlib.metadata.version("reasoning-gym")
    return versions
