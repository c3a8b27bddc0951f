"""Packages: what training needs, what it can do without, and what only some arms of the benchmark compare with."""

from __future__ import annotations

import contextlib
import io
import os
import shutil

from fp8ctl.doctor.finding import Answer, in_words, package, version

_PIP = "pip install -c constraints.txt"


def torch() -> Answer:
    """PyTorch and what it was built for."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Answer("ok", f"{torch.__version__}, {build}")


def fp8_reference() -> Answer:
    """A tile goes through E4M3 and back."""
    import torch

    from fp8ctl.fp8.reference import dequantize, quantize_tile

    x_MK = torch.linspace(-3, 3, 256).reshape(2, 128)
    error = (dequantize(*quantize_tile(x_MK)) - x_MK).abs().max().item()
    if not error <= 3 / 16:  # half a step of E4M3 at 3 is 1/8
        return Answer("broken", f"a round trip is off by {error:.3g}", "report this with `fp8ctl doctor --json`")
    return Answer("ok", f"quantised a tile and back, largest error {error:.3g} of 3")


def gloo() -> Answer:
    """Collectives between the hosts of ranks: a sum over a world of one."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Answer("absent", "torch was built without it", "install a torch build with gloo")
    total = one_rank_sum("gloo", torch.device("cpu"))
    if total != 4.0:
        return Answer("broken", f"a sum over one rank gave {total:g} for 4", "reinstall torch")
    return Answer("ok", "one rank reduced a tensor on the CPU")


def one_rank_sum(backend: str, device: object) -> float:
    """The sum of four ones after an all-reduce in a world of one rank."""
    import torch
    import torch.distributed as dist

    assert isinstance(device, torch.device)
    on_gpu = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=on_gpu)
    try:
        ones_4 = torch.ones(4, device=device)
        dist.all_reduce(ones_4)
        return ones_4.sum().item()
    finally:
        dist.destroy_process_group()


def hydra() -> Answer:
    """Hydra, the ANTLR that it was built against, and conf/."""
    antlr = version("antlr4-python3-runtime")
    if antlr is not None and not antlr.startswith("4.9."):
        fix = "pip install antlr4-python3-runtime==4.9.3"
        return Answer("broken", f"antlr4-python3-runtime {antlr}; Hydra 1.3 needs 4.9", fix)
    answer = package("hydra", "hydra-core", f"{_PIP} hydra-core")
    if answer.state != "ok":
        return answer
    from fp8ctl.config.compose import compose

    compose("train_cpt")
    return Answer("ok", f"{answer.detail}, conf/ composes")


def deepspeed() -> Answer:
    """DeepSpeed, imported."""
    _choose_accelerator()
    return package("deepspeed", "deepspeed", f"{_PIP} deepspeed")


def deepspeed_ops() -> Answer:
    """Which of DeepSpeed's compiled ops are there or could be built. Nothing is built, and none is used."""
    _choose_accelerator()
    unused = "fp8ctl uses none of them"
    if version("deepspeed") is None:
        return Answer("skipped", "DeepSpeed is absent")
    with contextlib.redirect_stdout(io.StringIO()):  # it talks while it looks
        from deepspeed.git_version_info import installed_ops
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        prebuilt = sorted(name for name, is_there in installed_ops.items() if is_there)
        buildable, missing = [], _build_obstacle()
        for title, name in (("FusedAdam", "fused_adam"), ("CPUAdam", "cpu_adam")):
            if missing is None and name in ALL_OPS and ALL_OPS[name].is_compatible(verbose=False):
                buildable.append(title)
    there = f"prebuilt: {', '.join(prebuilt)}" if prebuilt else "none prebuilt"
    could = (
        " and ".join(buildable) + " could be built" if buildable else f"none could be built ({missing or 'refused'})"
    )
    return Answer("note", f"{there}; {could}; {unused}")


def _choose_accelerator() -> None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns at import when it has to find out


def _build_obstacle() -> str | None:
    """What building an op would lack here."""
    import torch

    if version("ninja") is None and shutil.which("ninja") is None:
        return "no ninja"
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "c++", "clang++")):
        return "no C++ compiler"
    if torch.cuda.is_available():
        from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch

        try:
            assert_no_cuda_mismatch()
        except Exception as e:  # no nvcc, or one of another CUDA
            return in_words(e).partition(": ")[2].lstrip(">- ") or in_words(e)
    return None


def tokenizers() -> Answer:
    """The tokenizers of data preparation and evaluation."""
    return package("tokenizers", "tokenizers", f"{_PIP} tokenizers")


def mlflow() -> Answer:
    """A sink of metrics; a run can do without."""
    if version("mlflow") is None and version("mlflow-skinny") is not None:
        return package("mlflow", "mlflow-skinny", f"{_PIP} mlflow, or run with track=jsonl")
    return package("mlflow", "mlflow", f"{_PIP} mlflow, or run with track=jsonl")


def reasoning_gym() -> Answer:
    """Generated questions."""
    fix = f"{_PIP} reasoning-gym (generated questions and evaluation need it)"
    return package("reasoning_gym", "reasoning-gym", fix)


def transformers() -> Answer:
    """Hugging Face's own models: the arm `hf` of the benchmark."""
    return _arm("transformers", "transformers", "hf")


def torchao() -> Answer:
    """Arms `torchao-*` of the benchmark."""
    return _arm("torchao", "torchao", "torchao-tensorwise and torchao-rowwise")


def liger_kernel() -> Answer:
    """Fused kernels of others, for comparisons of one's own: nothing here needs them."""
    if version("liger-kernel") is None:
        return Answer("note", "not installed, and nothing needs it: all arms have the same loss head")
    return package("liger_kernel", "liger-kernel", "pip uninstall liger-kernel (nothing needs it)")


def _arm(module: str, distribution: str, arms: str) -> Answer:
    absent = f"not installed: `fp8ctl bench step` leaves out {arms}"
    return package(
        module, distribution, f"pip install {distribution} (for the benchmark's comparison only)", absent=absent
    )
