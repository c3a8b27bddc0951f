"""What the GPU really does: each check runs the thing and compares the result with plain PyTorch on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from fp8ctl.doctor.finding import Answer, version
from fp8ctl.doctor.machine import Driver, ask_driver

if TYPE_CHECKING:
    import torch

_GIB = 1 << 30
_GEMM_TOLERANCE = 0.01  # rounding the result to BF16 alone is 0.002
_ATTENTION_TOLERANCE = 0.02  # BF16 probabilities and outputs are 0.003 to 0.006
_FIRST_DRIVER = {
    12: "525",
    13: "580",
}  # the first that runs a CUDA of that major version, from the toolkit's release notes


# ---------------------------------------------------------------- what is there


def devices() -> Answer:
    """The GPUs that torch sees; or why it sees none of those the driver has."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(count)) / _GIB
        return Answer("ok", f"{count} x {', '.join(names)}, {memory:.0f} GiB")
    driver = ask_driver()
    if driver is None or driver.num_gpus == 0:
        return Answer("note", "none: everything runs on the CPU, FP8 is emulated")
    there = f"the driver has {driver.num_gpus}, torch sees none"
    if torch.version.cuda is None:
        return Answer("broken", f"{there}: it is a CPU build", "install a CUDA build of torch (https://pytorch.org)")
    return Answer("broken", there, "see the line on the driver, and CUDA_VISIBLE_DEVICES")


def capability() -> Answer:
    """Compute capability, and whether there are FP8 tensor cores."""
    import torch

    from fp8ctl.fp8.backend import FIRST_FP8_CAPABILITY, PROVEN_CAPABILITIES

    if skipped := _why_skipped():
        return skipped
    found = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    text = f"compute capability {', '.join(f'{major}.{minor}' for major, minor in found)}"
    if found[0] < FIRST_FP8_CAPABILITY:
        fix = "use a GPU of compute capability 8.9 or newer; FP8 is emulated here, precision=bf16 runs"
        return Answer("absent", f"{text}: no FP8 tensor cores", fix)
    if any(c not in PROVEN_CAPABILITIES for c in found):
        return Answer("ok", f"{text}; the native backend is unproven there (proven: 9.0)")
    return Answer("ok", text)


def driver() -> Answer:
    """NVIDIA's driver, and whether it can run the CUDA that torch was built for."""
    import torch

    return judge_driver(ask_driver(), torch.version.cuda)


def judge_driver(found: Driver | None, cuda_of_torch: str | None) -> Answer:
    """A driver runs every CUDA of its own major version and all older ones."""
    if found is None:
        if cuda_of_torch is None:
            return Answer("skipped", "no NVIDIA driver, and torch is a CPU build")
        return Answer("note", f"no NVIDIA driver answers; torch was built for CUDA {cuda_of_torch}")
    if found.cuda is None or cuda_of_torch is None:
        return Answer("ok", f"driver {found.version}")
    text = f"driver {found.version} runs CUDA {found.cuda[0]}.{found.cuda[1]}, torch was built for {cuda_of_torch}"
    wanted = tuple(int(part) for part in cuda_of_torch.split(".")[:2])
    if found.cuda[0] < wanted[0]:
        first = _FIRST_DRIVER.get(wanted[0])
        newer = f"driver {first} or newer" if first else "a newer driver"
        return Answer("broken", text, f"install {newer}, or a torch built for CUDA {found.cuda[0]}")
    if found.cuda < wanted:
        return Answer("note", f"{text}: works within one major version", "update the driver if kernels fail to load")
    return Answer("ok", text)


def _why_skipped(*, needs_fp8: bool = False) -> Answer | None:
    import torch

    from fp8ctl.fp8.backend import FIRST_FP8_CAPABILITY

    if not torch.cuda.is_available():
        return Answer("skipped", "no GPU")
    if needs_fp8 and torch.cuda.get_device_capability() < FIRST_FP8_CAPABILITY:
        return Answer("skipped", "the GPU has no FP8 tensor cores")
    return None


# ---------------------------------------------------------------- GEMMs


def cublas_block() -> Answer:
    """cuBLASLt with scales by tile and block: tile x block is fprop and dgrad, tile x tile is wgrad."""
    import torch

    from fp8ctl.config.schema import RecipeConfig
    from fp8ctl.fp8.backend import cublas_lacks

    if skipped := _why_skipped(needs_fp8=True):
        return skipped
    if lacking := cublas_lacks(RecipeConfig()):
        if torch.cuda.get_device_capability()[0] == 9:
            return Answer("absent", lacking.why, lacking.fix)
        return Answer("note", f"{lacking.why}; precision.gemm=auto takes the Triton GEMM instead")
    return _judge_gemms(
        {"tile x block": scaled_mm_error("block", "cuda"), "tile x tile": scaled_mm_error("tile", "cuda")}
    )


def cublas_row() -> Answer:
    """cuBLASLt (CUTLASS before Hopper) with one scale a row."""
    return _why_skipped(needs_fp8=True) or _judge_gemms({"row x row": scaled_mm_error("row", "cuda")})


def cublas_tensor() -> Answer:
    """cuBLASLt with one scale a matrix."""
    return _why_skipped(needs_fp8=True) or _judge_gemms({"tensor x tensor": scaled_mm_error("tensor", "cuda")})


def _judge_gemms(errors: dict[str, float]) -> Answer:
    off = [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error < _GEMM_TOLERANCE]
    if off:
        return Answer(
            "broken", f"ran, but {' and '.join(off)}", "reinstall torch with the cuBLAS wheel that it asks for"
        )
    installed = version("nvidia-cublas") or version("nvidia-cublas-cu12")
    of = f" (nvidia-cublas {installed})" if installed else ""
    return Answer("ok", f"{' and '.join(errors)} ran right{of}, largest error {max(errors.values()):.2g}")


def scaled_mm_error(kind: str, device: str) -> float:
    """Relative error of one `scaled_mm` [256, 512] x [512, 384] against the FP32 product of the same FP8 matrices.

    Args:
        kind: what shares a scale: `block` (tiles by blocks), `tile` (tiles by tiles), `row` or `tensor`.
    """
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    from fp8ctl.fp8 import reference

    generator = torch.Generator().manual_seed(0)
    a_MK, b_NK = (torch.randn(rows, 512, generator=generator) for rows in (256, 384))
    if kind in ("block", "tile"):
        a = reference.quantize_tile(a_MK)
        b = reference.quantize_block(b_NK) if kind == "block" else reference.quantize_tile(b_NK)
        # In memory tiles lie contraction tile by contraction tile, blocks row of blocks by row of blocks
        scale_a = a.scale_inv.to(device).t().contiguous().t()
        scale_b = b.scale_inv.to(device).t() if kind == "block" else b.scale_inv.to(device).t().contiguous().t()
        type_a = ScalingType.BlockWise1x128
        type_b = ScalingType.BlockWise128x128 if kind == "block" else ScalingType.BlockWise1x128
        wanted_MN = reference.gemm_nt(a, b, torch.float32)
        a_codes, b_codes = a.codes, b.codes
    else:
        (a_codes, inv_a), (b_codes, inv_b) = (_quantize_plainly(x, by_row=kind == "row") for x in (a_MK, b_NK))
        scale_a, scale_b = inv_a.to(device), inv_b.to(device).t().contiguous()
        type_a = type_b = ScalingType.RowWise if kind == "row" else ScalingType.TensorWise
        wanted_MN = (a_codes.float() * inv_a) @ (b_codes.float() * inv_b).t()
    got_MN = scaled_mm(
        a_codes.to(device), b_codes.to(device).t(), scale_a, type_a, scale_b, type_b, output_dtype=torch.bfloat16
    )
    return relative_error(got_MN, wanted_MN)


def _quantize_plainly(x_RK: torch.Tensor, *, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and the factors that multiply back, [R, 1] or [1, 1]."""
    import torch

    amax = x_RK.abs().amax(dim=1, keepdim=True) if by_row else x_RK.abs().amax().view(1, 1)
    return (x_RK * (448 / amax)).clamp(-448, 448).to(torch.float8_e4m3fn), amax / 448


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference, as a share of the norm of what was wanted (in FP32, on the CPU)."""
    return ((got.detach().cpu().float() - wanted).norm() / wanted.norm()).item()


def triton() -> Answer:
    """Triton compiles the tile quantiser and runs it; its bits are those of the reference."""
    import torch

    from fp8ctl.fp8 import reference
    from fp8ctl.fp8.formats import E4M3

    installed = version("triton")
    if importlib.util.find_spec("triton") is None:
        if skipped := _why_skipped():
            return skipped._replace(detail=f"not installed, and {skipped.detail}")
        return Answer("absent", "not installed: no native FP8, no torch.compile", "pip install triton")
    if skipped := _why_skipped(needs_fp8=True):
        return skipped
    from fp8ctl.fp8 import kernels

    x_MK = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got, wanted = kernels.quantize_tile(x_MK.cuda(), E4M3, "pow2"), reference.quantize_tile(x_MK)
    same_codes = torch.equal(got.codes.cpu().view(torch.uint8), wanted.codes.view(torch.uint8))
    if not same_codes or not torch.equal(got.scale_inv.cpu(), wanted.scale_inv):
        fix = "install the Triton that this torch asks for (`pip show torch` lists it)"
        return Answer("broken", f"{installed}: the tile quantiser ran, but differs from the reference", fix)
    return Answer("ok", f"{installed}: compiled and ran the tile quantiser, equal to the reference bit for bit")


# ---------------------------------------------------------------- attention


def cudnn_attention() -> Answer:
    """cuDNN's attention, forward and backward, with four query heads on each key/value head."""
    import torch

    from fp8ctl.model.attention import cudnn_rows

    if skipped := _why_skipped():
        return skipped
    number = torch.backends.cudnn.version() or 0
    name = f"cuDNN {number // 10000}.{number % 10000 // 100}.{number % 100}"
    return _judge_attention(lambda q, k, v: cudnn_rows(q, k, v, 256), (256,), name)


def flash_varlen() -> Answer:
    """FlashAttention over two packed documents of different lengths, forward and backward."""
    import torch

    from fp8ctl.model.attention import Documents, flash

    if skipped := _why_skipped():
        return skipped
    bounds = (0, 100, 256)
    documents = Documents(torch.tensor(bounds, dtype=torch.int32, device="cuda"), bounds, 156)
    return _judge_attention(lambda q, k, v: flash(q, k, v, documents), (100, 156), "documents of 100 and 156 tokens")


def attention_choice() -> Answer:
    """What `engine.attention=auto` takes here, for heads like those of most models."""
    from fp8ctl.errors import ModelError
    from fp8ctl.model.attention_choice import choose_attention

    if skipped := _why_skipped():
        return skipped
    try:
        chosen = choose_attention("auto", head_size=128, num_heads=8, num_kv_heads=2, device="cuda")
    except ModelError as e:
        return Answer("broken", e.message, e.hint or "")
    return Answer("ok", f"engine.attention=auto takes {chosen.name}: {chosen.reason}")


def _judge_attention(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], lengths: tuple[int, ...], what: str
) -> Answer:
    errors = attention_errors(run, lengths, "cuda")
    off = [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error < _ATTENTION_TOLERANCE]
    if off:
        return Answer(
            "broken", f"{what}: ran, but {', '.join(off)}", "set engine.attention to the other kind; update torch"
        )
    return Answer(
        "ok", f"{what}: forward and backward with grouped heads ran right, largest error {max(errors.values()):.2g}"
    )


def attention_errors(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], lengths: tuple[int, ...], device: str
) -> dict[str, float]:
    """Relative errors of the output and the gradients of q [T, 8, 128], k and v [T, 2, 128], against FP32 on the CPU."""
    import torch

    generator, T = torch.Generator().manual_seed(0), sum(lengths)
    inputs = [torch.randn(T, n, 128, generator=generator).to(torch.bfloat16) for n in (8, 2, 2)]
    d_out = torch.randn(T, 8, 128, generator=generator).to(torch.bfloat16)
    fast = [x.to(device, copy=True).requires_grad_() for x in inputs]
    plain = [x.detach().float().requires_grad_() for x in inputs]
    got, wanted = run(*fast), _plain_attention(plain, lengths)
    got.backward(d_out.to(device))
    wanted.backward(d_out.float())
    errors = {"the output": relative_error(got, wanted.detach())}
    for name, x, y in zip("qkv", fast, plain, strict=True):
        assert x.grad is not None and y.grad is not None
        errors[f"the gradient of {name}"] = relative_error(x.grad, y.grad)
    return errors


def _plain_attention(qkv: list[torch.Tensor], lengths: tuple[int, ...]) -> torch.Tensor:
    """Each document by itself, [T, 8, 128]."""
    import torch

    outs = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in qkv), strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


# ---------------------------------------------------------------- ranks


def nccl() -> Answer:
    """NCCL: a sum over a world of one rank on the GPU."""
    import torch
    import torch.distributed as dist

    from fp8ctl.doctor.software import one_rank_sum

    if skipped := _why_skipped():
        return skipped
    if not dist.is_nccl_available():
        return Answer("absent", "torch was built without it", "install a CUDA build of torch (https://pytorch.org)")
    number = ".".join(map(str, torch.cuda.nccl.version()))
    total = one_rank_sum("nccl", torch.device("cuda", 0))
    if total != 4.0:
        return Answer("broken", f"{number}: a sum over one rank gave {total:g} for 4", "reinstall torch's NCCL wheel")
    return Answer("ok", f"{number}: one rank reduced a tensor on the GPU")
