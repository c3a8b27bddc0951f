"""What this machine can run. Every check answers on its own: a broken package is a finding, never a crash."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from fp8ctl.doctor.apart import Failed, Job, run_apart
from fp8ctl.doctor.finding import Answer, Finding
from fp8ctl.doctor.recipes import ALL_ROWS, RecipeRow, to_rows

_REINSTALL = "reinstall with `make setup`"
_CUDA_TORCH = "reinstall torch with the CUDA packages that it asks for"
_OTHER_ATTENTION = "set engine.attention to the other kind; update torch"


class Check(NamedTuple):
    """A function `module:name` of this package without arguments that gives an Answer, and what to do when it gives none."""

    name: str
    target: str
    place: Literal["machine", "gpu", "packages"]
    """Which of three processes runs it, side by side (see apart.py)."""
    fix: str = _REINSTALL
    needed: bool = False
    """Whether training needs it."""
    rests_on: str = ""
    """The check without which this one can't answer."""


CHECKS = (
    Check("python", "machine:python", "machine", needed=True),
    Check("CPU", "machine:cores", "machine"),
    Check("memory", "machine:memory", "machine"),
    Check("disk", "machine:disk", "machine", "run in a folder that exists and can be read", needed=True),
    Check("shared memory", "machine:shared_memory", "machine"),
    Check("C compiler", "machine:compiler", "machine", "set CC to a C compiler"),
    Check("torch", "software:torch", "gpu", needed=True),
    Check("FP8 reference", "software:fp8_reference", "gpu", needed=True, rests_on="torch"),
    Check("GPU", "gpu:devices", "gpu", _CUDA_TORCH, rests_on="torch"),
    Check("compute capability", "gpu:capability", "gpu", _CUDA_TORCH, rests_on="torch"),
    Check("driver", "gpu:driver", "gpu", "reinstall NVIDIA's driver", rests_on="torch"),
    Check("cuBLASLt by block", "gpu:cublas_block", "gpu", _CUDA_TORCH, rests_on="torch"),
    Check("cuBLASLt by row", "gpu:cublas_row", "gpu", _CUDA_TORCH, rests_on="torch"),
    Check("cuBLASLt by tensor", "gpu:cublas_tensor", "gpu", _CUDA_TORCH, rests_on="torch"),
    Check("Triton", "gpu:triton", "gpu", "see the C compiler's line; reinstall the Triton that torch asks for", rests_on="torch"),
    Check("cuDNN attention", "gpu:cudnn_attention", "gpu", _OTHER_ATTENTION, rests_on="torch"),
    Check("flash varlen", "gpu:flash_varlen", "gpu", _OTHER_ATTENTION, rests_on="torch"),
    Check("attention", "gpu:attention_choice", "gpu", _OTHER_ATTENTION, rests_on="torch"),
    Check("gloo", "software:gloo", "gpu", "make the host's own name resolve, or set GLOO_SOCKET_IFNAME=lo", True, "torch"),
    Check("NCCL", "gpu:nccl", "gpu", "run again with NCCL_DEBUG=WARN to see NCCL's own words", rests_on="torch"),
    Check("deepspeed", "software:deepspeed", "packages", needed=True, rests_on="torch"),
    Check("DeepSpeed ops", "software:deepspeed_ops", "packages", rests_on="deepspeed"),
    Check("hydra", "software:hydra", "packages", needed=True),
    Check("tokenizers", "software:tokenizers", "packages", needed=True),
    Check("mlflow", "software:mlflow", "packages", "reinstall mlflow, or run with track=jsonl"),
    Check("reasoning-gym", "software:reasoning_gym", "packages"),
    Check(
        "transformer-engine", "transformer_engine:answer", "packages", "pip install 'fp8ctl[te]' on a machine with CUDA",
        rests_on="torch",
    ),
    Check("transformers", "software:transformers", "packages"),
    Check("torchao", "software:torchao", "packages", "pip install torchao", rests_on="torch"),
    Check("liger-kernel", "software:liger_kernel", "packages", "pip install liger-kernel", rests_on="torch"),
)  # fmt: skip


@dataclass(frozen=True)
class Examination:
    """All findings in order, and which recipe runs where."""

    findings: list[Finding]
    recipes: list[RecipeRow]

    @property
    def faults(self) -> list[Finding]:
        """Findings that keep training from running at all."""
        return [f for f in self.findings if f.needed and f.state in ("absent", "broken")]


def examine() -> Examination:
    """Runs every check, all of them in processes of their own."""
    jobs: dict[str, list[Job]] = {"machine": [], "gpu": [], "packages": []}
    for check in CHECKS:
        jobs[check.place].append(Job(f"fp8ctl.doctor.{check.target}"))
    jobs["gpu"].append(ALL_ROWS)
    results = dict(zip(jobs, map(iter, run_apart(*jobs.values())), strict=True))
    findings: dict[str, Finding] = {}
    for check in CHECKS:
        findings[check.name] = to_finding(check, next(results[check.place]), findings.get(check.rests_on))
    return Examination(list(findings.values()), to_rows(next(results["gpu"])))


def to_finding(check: Check, result: Any, rests_on: Finding | None = None) -> Finding:
    """The line of the table for what a check answered, or failed to answer; then it is told once what was at fault."""
    if not isinstance(result, Failed):
        answer = Answer(*result)
    elif rests_on is not None and rests_on.state != "ok":
        answer = Answer("skipped", f"{check.rests_on} does not work")
    else:
        answer = Answer("broken", result.how, check.fix)
    return Finding(check.name, *answer, needed=check.needed)


def to_json(examination: Examination) -> dict[str, Any]:
    """The whole examination as data, with the versions behind it."""
    from fp8ctl.track.environment import collect_environment

    environment = collect_environment()
    return {
        "schema": 1,
        "ok": not examination.faults,
        "findings": [asdict(f) for f in examination.findings],
        "recipes": [row._asdict() for row in examination.recipes],
        "environment": {key: environment[key] for key in ("time", "fp8ctl", "python", "platform", "packages", "cpu")},
    }
