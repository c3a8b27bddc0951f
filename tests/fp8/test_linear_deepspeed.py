"""Fp8Linear inside a real DeepSpeed engine: its parameters are flattened, sharded, freed and gathered around it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

STEPS = 3

# In a process of its own: DeepSpeed sets up a process group and patches torch for good
SCRIPT = """
import copy, json, sys
import deepspeed, torch
import deepspeed.ops
from torch.utils.checkpoint import checkpoint
from fp8ctl.fp8.linear import Fp8Linear

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would compile C++ for a minute
deepspeed.init_distributed("gloo")


class Net(torch.nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.up = Fp8Linear(96, 200)
        self.down = Fp8Linear(200, 96, bias=False)
        self.last = Fp8Linear(96, 40, precision="bf16")

    def block(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.last(x).float().square().mean()


def train(stage, recompute):
    torch.manual_seed(0)
    net = Net(recompute).bfloat16()
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    losses = []
    for step in range(int(sys.argv[1])):
        for micro in range(2):
            x = torch.randn(3, 50, 96, generator=torch.Generator().manual_seed(10 * step + micro)).bfloat16()
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if step == 1:
            net.up.precision = "bf16"
    flops = {n: m.counter.flops for n, m in net.named_modules() if isinstance(m, Fp8Linear)}
    params = [p for p in net.parameters()]
    with deepspeed.zero.GatheredParameters(params, enabled=stage == 3):
        moved = all(not torch.equal(p.detach(), start[n]) for n, p in net.named_parameters())
        weights = sum(p.double().sum().item() for p in params)
    return {"losses": losses, "flops": flops, "moved": moved, "weights": weights}


print("RESULT" + json.dumps({f"{s}-{r}": train(s, r) for s, r in ((1, False), (3, False), (3, True))}))
"""


@pytest.mark.slow
def test_zero_3_gives_the_same_run_and_counts_every_gemm() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(STEPS)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout[done.stdout.index("RESULT") + len("RESULT") :].splitlines()[0])
    one, three, recomputed = results["1-False"], results["3-False"], results["3-True"]

    assert one["moved"] and three["moved"] and recomputed["moved"]
    assert three["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert recomputed["losses"] == three["losses"] and recomputed["weights"] == three["weights"]
    assert one["losses"][-1] < one["losses"][0]

    up, last = 2 * 150 * 200 * 96, 2 * 150 * 96 * 40
    micro_steps = 2 * STEPS
    for result, forwards in ((one, 1), (three, 1), (recomputed, 2)):
        flops = result["flops"]
        # up went to BF16 after two of the three steps; its input is data, so there is no dgrad
        assert flops["up"]["fprop"] == {"fp8": 4 * up * forwards, "bf16": 2 * up * forwards}
        assert flops["up"]["wgrad"] == {"fp8": 4 * up, "bf16": 2 * up}
        assert flops["up"]["dgrad"] == {"fp8": 0, "bf16": 0}
        assert flops["down"]["dgrad"] == flops["down"]["wgrad"] == {"fp8": micro_steps * up, "bf16": 0}
        assert flops["down"]["fprop"]["bf16"] == 0
        for direction in ("fprop", "dgrad", "wgrad"):
            assert flops["last"][direction] == {"fp8": 0, "bf16": micro_steps * last}
