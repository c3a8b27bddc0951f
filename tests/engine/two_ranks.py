"""Run on two ranks by test_ranks.py; rank 0 leaves what it saw in a JSON file. `first` trains and saves, `second` resumes.

Runs on one rank too, and on GPUs with FP8CTL_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import engine_cases as cases

from fp8ctl.engine import checkpoint
from fp8ctl.engine.dist import Dist, end_process
from fp8ctl.engine.engine import Engine
from fp8ctl.errors import CheckpointError

SAVE_AT, STEPS = 6, 8


class Sum(torch.nn.Module):
    """Its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).float().sum()


def fingerprint(engine: Engine) -> str:
    """Hash of all weights; the same string on every rank."""
    digest = hashlib.sha256()
    for name, weight in engine.gather_weights(torch.float32).items():
        digest.update(name.encode() + weight.numpy().tobytes())
    return engine.dist.broadcast_object(digest.hexdigest())


def save(engine: Engine, folder: Path, step: int) -> None:
    checkpoint.save_checkpoint(
        engine,
        folder,
        client_state={"step": step},
        rank_state={"rank": engine.dist.rank},
        write_weights=cases.write_weights,
    )


def steps_with_a_checkpoint(stage: int, dtype: str, folder: Path) -> dict[str, Any]:
    config = cases.settings(stage, dtype)
    engine = cases.make_engine(config, seed=engine_seed())  # other weights on each rank: rank 0's must win
    numbers = []
    for step in range(STEPS):
        if step == SAVE_AT:
            save(engine, folder, step)
        numbers.append(cases.run_step(engine, config, step))
    result = {"numbers": numbers, "weights": fingerprint(engine)}
    engine.close()
    return result


def engine_seed() -> int:
    return cases.start(cases.settings(0, "fp32")).rank


def resumed(stage: int, dtype: str, folder: Path) -> dict[str, Any]:
    config = cases.settings(stage, dtype)
    engine = cases.make_engine(config, seed=99)
    client_state, rank_state = checkpoint.load_checkpoint(engine, folder)
    assert client_state == {"step": SAVE_AT}
    assert rank_state == {"rank": engine.dist.rank}
    numbers = [cases.run_step(engine, config, step) for step in range(SAVE_AT, STEPS)]
    result = {"numbers": numbers, "weights": fingerprint(engine)}
    engine.close()
    return result


def veto(stage: int, dtype: str) -> bool:
    config = cases.settings(stage, dtype)
    results = []
    for with_drops in (False, True):
        engine, numbers = cases.make_engine(config), []
        for step in range(2):
            if with_drops:
                cases.run_backward(engine, config, 40 + step)
                engine.drop_step()
                # One rank alone has a broken gradient; no rank may step
                poison = math.nan if engine.dist.rank == engine.dist.world_size - 1 else 1.0
                _, norm = cases.run_backward(engine, config, 50 + step, poison=poison)
                assert not math.isfinite(norm)
                assert engine.apply_step(1e-3) is False
            numbers.append(cases.run_step(engine, config, step))
        results.append((numbers, fingerprint(engine)))
        engine.close()
    return results[0] == results[1]


def fp32_reduction(stage: int, dtype: str) -> float:
    """Norm of the sum of 1 on rank 0 and 2^-9 on rank 1, divided by the 32 of its shape; 1 when summed in BF16."""
    config = cases.settings(stage, dtype, rows=2)
    dist = cases.start(config)
    engine = Engine(Sum(), config, dist)
    x = torch.full((32, 32), 1.0 if dist.rank == 0 else 2.0**-9, dtype=engine.dtype, device=dist.device)
    for _ in range(engine.grad_accum_steps):
        engine.backward(engine.forward(x), num_trainable=1)
    norm = engine.prepare_step() / 32
    engine.drop_step()
    engine.close()
    return norm


def failing_saves(root: Path) -> list[dict[str, Any]]:
    """A disk that is full under rank 1 alone, then under rank 0 while it writes weights; then training and saving go on."""
    config, reports = cases.settings(2, "bf16"), []
    engine = cases.make_engine(config)
    cases.run_step(engine, config, 0)
    save(engine, root / "step-00000001", 1)
    usual = checkpoint._save

    def full_disk(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for failing_rank, where in ((engine.dist.world_size - 1, "deepspeed"), (0, "weights")):
        if engine.dist.rank == failing_rank and where == "deepspeed":
            checkpoint._save = full_disk
        write = full_disk if where == "weights" else cases.write_weights
        try:
            checkpoint.save_checkpoint(
                engine, root / "step-00000002", client_state={}, rank_state={}, write_weights=write
            )
        except CheckpointError as error:
            everywhere = engine.dist.gather_objects((error.message, error.hint))
            reports.append({"errors": everywhere, "left": sorted(p.name for p in root.iterdir())})
        checkpoint._save = usual
    cases.run_step(engine, config, 1)
    save(engine, root / "step-00000002", 2)
    reports.append({"left": sorted(p.name for p in root.iterdir())})
    engine.close()
    return reports


def refusals(root: Path) -> list[Any]:
    """One rank alone finds a damaged file: all ranks learn it."""
    config = cases.settings(2, "bf16")
    engine = cases.make_engine(config)
    try:
        checkpoint.load_checkpoint(engine, root)
    except CheckpointError as error:
        return engine.dist.gather_objects(error.message)
    return []


def collectives(dist: Dist) -> dict[str, Any]:
    mine = [float(dist.rank), math.nan if dist.rank == 1 else 1.0, 0.1]
    return {
        **{op: [str(v) for v in dist.all_reduce_floats(mine, op=op)] for op in ("sum", "max", "min")},  # type: ignore[arg-type]
        "broadcast": dist.broadcast_object(f"from {dist.rank}", source=dist.world_size - 1),
        "gather": dist.gather_objects(dist.rank),
    }


def main() -> None:
    part, root, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    dist = cases.start(cases.settings(0, "fp32"))
    every = [(stage, dtype) for dtype in cases.DTYPES for stage in cases.STAGES]
    if part == "first":
        seen = {
            "collectives": collectives(dist),
            "runs": {
                f"{s}-{d}": steps_with_a_checkpoint(s, d, root / f"run-{s}-{d}" / "step-00000006") for s, d in every
            },
            "veto": {f"{s}-{d}": veto(s, d) for s, d in every},
            "fp32_reduction": {f"{s}-{d}": fp32_reduction(s, d) for s, d in every},
            "failing": failing_saves(root / "failing"),
        }
    else:
        seen = {
            "runs": {f"{s}-{d}": resumed(s, d, root / f"run-{s}-{d}" / "step-00000006") for s, d in every},
            "damaged": refusals(root / "damaged" / "step-00000006"),
        }
    if dist.is_main:
        out.write_text(json.dumps(seen))
    dist.barrier()
    dist.shutdown()
    end_process()


main()
