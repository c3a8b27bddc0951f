"""Ranks and devices: the process group, the device, and the few collectives that training needs outside DeepSpeed.

A rank started by a launcher finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. Without
them the process is a world of its own, so tests and single-device runs need no launcher and no port. The process group
is made here rather than by DeepSpeed, for three things: one timeout for every collective, a gloo side beside NCCL so
that adding two host numbers never waits for the GPU, and no compilation (DeepSpeed would build a shared-memory op with
g++ on a CPU).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as torch_dist

from fp8ctl.config.schema import EngineConfig, LaunchConfig
from fp8ctl.errors import ConfigError, LaunchError

_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Dist:
    """This process among all ranks. All ranks must call every method but `shutdown` in the same order."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @classmethod
    def start(cls, engine: EngineConfig, launch: LaunchConfig) -> Dist:
        """Joins the other ranks (or makes a world of one), chooses the device, and sets the number of CPU threads.

        Idempotent within a process. Sets DS_ACCELERATOR, so it must come before the first import of deepspeed.

        Raises:
            ConfigError: a GPU was asked for that is not there.
            LaunchError: the environment is incomplete, or the ranks don't find each other.
        """
        rank, local_rank, world_size = _place()
        device = _device(engine.device, local_rank)
        torch.set_num_threads(launch.threads_per_rank)
        # DeepSpeed has no other way to be told. Without the last it forks numactl at each reduction on a CPU
        os.environ["DS_ACCELERATOR"] = device.type
        os.environ["LOCAL_RANK"] = str(local_rank)
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
        if not torch_dist.is_initialized():
            _join(device, rank, world_size, timedelta(seconds=launch.collective_timeout_s))
        _quiet_deepspeed(device)
        return cls(rank, local_rank, world_size, device)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes what all ranks agree on."""
        return self.rank == 0

    def all_reduce_floats(self, values: list[float], op: Literal["sum", "max", "min"] = "sum") -> list[float]:
        """The values reduced over all ranks in FP64, with the same bits on each rank. A NaN on any rank gives NaN."""
        values_N = torch.tensor(values, dtype=torch.float64)
        if op == "sum":
            torch_dist.all_reduce(values_N)
            return values_N.tolist()
        # A comparison drops NaN or keeps it depending on the order of ranks, so it travels apart
        nan_N = values_N.isnan().double()
        torch_dist.all_reduce(nan_N)
        values_N = values_N.masked_fill(values_N.isnan(), float("-inf" if op == "max" else "inf"))
        torch_dist.all_reduce(values_N, op=torch_dist.ReduceOp.MAX if op == "max" else torch_dist.ReduceOp.MIN)
        return values_N.masked_fill(nan_N > 0, float("nan")).tolist()

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The `value` of rank `source` on every rank; what the others hand in is ignored."""
        box = [value]
        torch_dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The `value` of every rank in order of ranks, on every rank."""
        values: list[Any] = [None] * self.world_size
        torch_dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        torch_dist.all_reduce(torch.zeros(1))

    def shutdown(self) -> None:
        """Leaves the process group; nothing collective may follow in this process."""
        if torch_dist.is_initialized():
            torch_dist.destroy_process_group()


def end_process() -> NoReturn:
    """Ends a rank with exit status 0: exit handlers run and output is flushed, the interpreter is not torn down.

    A thread of gloo may still hold the tensor of the last collective. If it lets go of it while the interpreter is being torn
    down, C++ aborts the process ("terminate called without an active exception"), and the launcher takes a run that went
    well for a failed one. On busy machines that is common, and leaving the process group does not prevent it.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _place() -> tuple[int, int, int]:
    """(rank, local rank, world size)."""
    if torch_dist.is_initialized():
        return torch_dist.get_rank(), int(os.environ["LOCAL_RANK"]), torch_dist.get_world_size()
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 0, 1
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise LaunchError(
            f"this rank's environment lacks {', '.join(missing)}",
            "start ranks with `fp8ctl train`, or unset RANK and WORLD_SIZE to run a single rank",
        )
    return int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= found:
        raise ConfigError(
            f"rank {local_rank} of this node needs a GPU of its own, {found} can be used",
            "set launch.num_ranks to the number of GPUs, or engine.device=cpu" if found else "set engine.device=cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device, rank: int, world_size: int, timeout: timedelta) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        torch_dist.init_process_group(backend, store=torch_dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    try:
        torch_dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    except torch_dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = str(error).strip().splitlines()[0]
        raise LaunchError(
            f"rank {rank} of {world_size} found no other ranks at {where}: {reason}",
            "see the logs of the other ranks; another program may hold the port, then start again",
        ) from error


def _quiet_deepspeed(device: torch.device) -> None:
    """Imports DeepSpeed, checks its device, and keeps it from compiling, probing compilers, and writing to stdout."""
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    assert get_accelerator().device_name() == device.type, "deepspeed was imported before Dist.start chose the device"
    # Filled in lazily by running g++ on every op; only the shared-memory all-reduce of CPU inference ever looks
    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})
    logger.setLevel(logging.WARNING)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr  # setStream would flush the old one, which may be closed by now
    # New torch versions rename the collectives that DeepSpeed calls, and say so once per rank and call site
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
