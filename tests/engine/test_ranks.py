"""Two CPU ranks against one: the same gradient, the same veto, checkpoints that survive a rank's failure, exact resume.

Two starts of two processes for all of it; the script is two_ranks.py.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_cases
import pytest
import torch
from engine_cases import DTYPES, STAGES, make_engine, run_step, settings

from fp8ctl.engine import checkpoint
from fp8ctl.errors import CheckpointError

pytestmark = pytest.mark.slow
everywhere = pytest.mark.parametrize(("stage", "dtype"), [(s, d) for d in DTYPES for s in STAGES])


def start_ranks(part: str, root: Path, *, ranks: int = 2, **environment: str) -> dict[str, Any]:
    """What rank 0 saw, and what all ranks wrote to the terminal."""
    out = root / f"{part}.json"
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "--"]
    command += [str(Path(__file__).with_name("two_ranks.py")), part, str(root), str(out)]
    path = os.pathsep.join(p for p in (str(Path(__file__).parents[2]), env.get("PYTHONPATH")) if p)
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(out.read_text()), "stdout": done.stdout, "stderr": done.stderr}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def first(root: Path) -> dict[str, Any]:
    return start_ranks("first", root, TORCH_EXTENSIONS_DIR=str(root / "compiled"))


@pytest.fixture(scope="module")
def second(root: Path, first: dict[str, Any]) -> dict[str, Any]:
    damaged = root / "damaged" / "step-00000006"
    shutil.copytree(root / "run-2-bf16" / "step-00000006", damaged)
    file = next((damaged / "deepspeed").glob("*rank_1*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return start_ranks("second", root)


@everywhere
def test_two_ranks_train_like_one(stage: int, dtype: str, first: dict[str, Any]) -> None:
    config = settings(stage, dtype)
    engine = make_engine(config)
    tolerance = 1e-6 if dtype == "fp32" else 1e-3
    for step, (loss, norm) in enumerate(first["runs"][f"{stage}-{dtype}"]["numbers"]):
        expected_loss, expected_norm = run_step(engine, config, step)
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=10 * tolerance)
    engine.close()


@everywhere
def test_a_dropped_batch_was_never_seen_on_two_ranks(stage: int, dtype: str, first: dict[str, Any]) -> None:
    assert first["veto"][f"{stage}-{dtype}"] is True


@everywhere
def test_ranks_are_added_in_fp32(stage: int, dtype: str, first: dict[str, Any]) -> None:
    assert first["fp32_reduction"][f"{stage}-{dtype}"] == pytest.approx(1 + 2.0**-9, rel=1e-7)


@everywhere
def test_resume_in_new_processes_is_exact(
    stage: int, dtype: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    straight, resumed = first["runs"][f"{stage}-{dtype}"], second["runs"][f"{stage}-{dtype}"]
    assert resumed["numbers"] == straight["numbers"][-2:]
    assert resumed["weights"] == straight["weights"]


def test_collectives(first: dict[str, Any]) -> None:
    assert first["collectives"] == {
        "sum": ["1.0", "nan", "0.2"],
        "max": ["1.0", "nan", "0.1"],
        "min": ["0.0", "nan", "0.1"],
        "broadcast": "from 1",
        "gather": [0, 1],
    }


def test_a_disk_that_is_full_under_one_rank_stops_nobody(first: dict[str, Any]) -> None:
    on_rank_1, on_rank_0, after = first["failing"]
    hint = "free some space or lower loop.keep_checkpoints; older checkpoints are untouched"
    assert on_rank_1["errors"] == [["could not save step-00000002 (rank 1): the disk is full", hint]] * 2
    assert on_rank_0["errors"] == [["could not save step-00000002 (rank 0): the disk is full", hint]] * 2
    assert on_rank_1["left"] == on_rank_0["left"] == ["step-00000001"]
    assert after["left"] == ["step-00000001", "step-00000002"]


def test_a_damaged_file_is_known_to_all_ranks(second: dict[str, Any]) -> None:
    assert len(second["damaged"]) == 2
    assert second["damaged"][0] == second["damaged"][1]
    assert "the checksum of deepspeed/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt differs" in second["damaged"][0]


def test_another_number_of_ranks_is_refused(root: Path, first: dict[str, Any]) -> None:
    engine = make_engine(settings(1, "bf16"))
    folder = root / "run-1-bf16" / "step-00000006"
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_checkpoint(engine, folder)
    assert error.value.message == f"{folder} was saved on 2 ranks, this run is on 1 ranks"
    assert error.value.hint == (
        f"resume with launch.num_ranks=2, or start a new run from its weights with model.path={folder}/weights"
    )
    engine.close()


def test_nothing_is_compiled_and_nothing_printed(root: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert not (root / "compiled").exists()
    for seen in (first, second):
        assert seen["stdout"] == ""
        talk = [line for line in seen["stderr"].splitlines() if "torch.distributed" not in line and line.strip("* ")]
        assert talk == []


@pytest.mark.gpu
def test_gpus(tmp_path: Path) -> None:
    """Every stage on as many GPUs as there are, at most two: training, veto, failing saves, exact resume."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    ranks = min(2, torch.cuda.device_count())
    first = start_ranks("first", tmp_path, ranks=ranks, FP8CTL_TEST_DEVICE="cuda")
    (tmp_path / "damaged").mkdir()
    second = start_ranks("second", tmp_path, ranks=ranks, FP8CTL_TEST_DEVICE="cuda")
    assert len(first["runs"]) == len(second["runs"]) == len(STAGES) * len(DTYPES)
    for name, straight in first["runs"].items():
        numbers, expected = straight["numbers"], first["runs"][f"0-{name[2:]}"]["numbers"]
        assert numbers == [pytest.approx(e, rel=1e-5 if name.endswith("fp32") else 5e-3) for e in expected]
        assert second["runs"][name]["numbers"] == numbers[-2:]
        assert second["runs"][name]["weights"] == straight["weights"]
    assert all(first["veto"].values())
    assert [report["left"] for report in first["failing"]] == [["step-00000001"]] * 2 + [
        ["step-00000001", "step-00000002"]
    ]


def test_the_weights_are_rank_0s(first: dict[str, Any]) -> None:
    losses = [first["runs"][f"{s}-fp32"]["numbers"][0][0] for s in STAGES]
    engine, config = make_engine(settings(0, "fp32"), seed=0), settings(0, "fp32")
    expected, _ = run_step(engine, config, 0)
    assert losses == pytest.approx([expected] * 4, rel=1e-6)
    engine.close()
    assert engine_cases.STAGES == STAGES
