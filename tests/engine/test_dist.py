"""Ranks, devices and small collectives, in a world of one (two ranks: test_ranks.py)."""

import math
import os
import subprocess
import sys

import engine_cases
import pytest
import torch

from fp8ctl.config.schema import EngineConfig, LaunchConfig
from fp8ctl.engine.dist import Dist
from fp8ctl.errors import ConfigError, LaunchError

CPU = EngineConfig(device="cpu")


def test_a_process_without_launcher_is_a_world_of_one() -> None:
    dist = Dist.start(CPU, LaunchConfig())
    assert (dist.rank, dist.local_rank, dist.world_size, dist.is_main) == (0, 0, 1, True)
    assert dist.device == torch.device("cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert torch.get_num_threads() == 1
    assert Dist.start(CPU, LaunchConfig()) == dist


def test_sums_keep_fp64() -> None:
    dist = engine_cases.start(engine_cases.settings(0, "fp32"))
    assert dist.all_reduce_floats([2.0**53 + 2, 0.1, -1.0]) == [2.0**53 + 2, 0.1, -1.0]
    assert dist.all_reduce_floats([]) == []


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_what_is_not_finite_stays_so(op: str) -> None:
    dist = engine_cases.start(engine_cases.settings(0, "fp32"))
    nan, infinite, below, number = dist.all_reduce_floats([math.nan, math.inf, -math.inf, 3.0], op=op)
    assert math.isnan(nan)
    assert (infinite, below, number) == (math.inf, -math.inf, 3.0)


def test_objects_travel() -> None:
    dist = engine_cases.start(engine_cases.settings(0, "fp32"))
    assert dist.broadcast_object({"a": (1, None)}) == {"a": (1, None)}
    assert dist.gather_objects("x") == ["x"]
    dist.barrier()


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError) as error:
        Dist.start(EngineConfig(device="cuda"), LaunchConfig())
    assert error.value.message == "rank 0 of this node needs a GPU of its own, 0 can be used"
    assert error.value.hint == "set engine.device=cpu"


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return subprocess.run(
        [sys.executable, "-c", code], env={**env, **environment}, capture_output=True, text=True, check=False
    )


START = """
from fp8ctl.config.schema import EngineConfig, LaunchConfig
from fp8ctl.engine.dist import Dist
from fp8ctl.errors import LaunchError
try:
    Dist.start(EngineConfig(device="cpu"), LaunchConfig(collective_timeout_s=2))
except LaunchError as error:
    print(error.message, "|", error.hint)
"""


def test_half_an_environment_is_refused() -> None:
    done = run_python(START, RANK="0", WORLD_SIZE="2")
    assert done.stdout.strip() == (
        "this rank's environment lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT | "
        "start ranks with `fp8ctl train`, or unset RANK and WORLD_SIZE to run a single rank"
    )


def test_ranks_that_never_come_are_reported() -> None:
    done = run_python(START, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert done.stdout.startswith("rank 1 of 2 found no other ranks at 127.0.0.1:1: "), done.stderr
    assert done.stdout.strip().endswith("another program may hold the port, then start again")


def test_launch_error_is_a_failed_run() -> None:
    assert LaunchError("x").exit_code == 1


END = """
import atexit, sys
from fp8ctl.engine.dist import end_process
class Remains:
    def __del__(self):
        print("interpreter torn down")
sys.remains = Remains()
atexit.register(print, "exit handler")
print("last words", end=" | ")
end_process()
"""


def test_a_rank_ends_without_tearing_the_interpreter_down() -> None:
    """Which C++ threads that still hold tensors would answer with an abort."""
    done = run_python(END)
    assert (done.returncode, done.stdout) == (0, "last words | exit handler\n"), done.stderr
