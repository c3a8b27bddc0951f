"""Which attention kernel a GPU runs: tried out forward and backward, chosen once, with the reason in words."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from fp8ctl.errors import ModelError
from fp8ctl.model.attention import AttentionKind, Documents, attention

_HOPPER = 9
_TRIED_BOUNDS = ((0, 128, 256), (0, 90, 91, 256))
"""Documents of equal length, and of different ones."""
_TOLERANCE = 0.02
"""Largest relative error against FP32; BF16 rounding gives some 0.005."""


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen kernel and why."""

    name: AttentionKind
    reason: str


def choose_attention(
    asked: str,
    *,
    head_size: int,
    num_heads: int,
    num_kv_heads: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionChoice:
    """The kernel for `engine.attention=asked`, tried with heads like the model's.

    auto takes cuDNN on Hopper (FlashAttention for documents of different lengths) and FlashAttention elsewhere; a
    kernel that does not run there is an error unless another fast one does. PyTorch's slow ways are taken on a CPU, in
    FP32, and where `any` asks for them.

    Raises:
        ModelError: the kernel asked for does not run here, or auto finds none.
    """
    device, heads = torch.device(device), (num_heads, num_kv_heads, head_size)
    if asked == "any":
        return AttentionChoice("any", "asked for: each document by itself, by whatever PyTorch picks")
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        where = f"on {device.type}" if device.type != "cuda" else f"in {str(dtype).removeprefix('torch.')}"
        if asked != "auto":
            raise ModelError(f"no {asked} attention {where}", "use engine.attention=auto")
        return AttentionChoice("any", f"{where} each document by itself, by PyTorch's own choice")
    wanted: list[tuple[AttentionKind, str]]
    if asked == "cudnn":
        wanted = [("cudnn", "asked for: cuDNN, and only rows full of equal documents")]
    elif asked == "flash":
        wanted = [("flash", "asked for: FlashAttention for all documents")]
    else:
        wanted = [("flash", "FlashAttention for all documents: it runs here")]
        if torch.cuda.get_device_capability(device)[0] == _HOPPER:
            why = "cuDNN for rows full of equal documents (fastest on Hopper), FlashAttention for different lengths"
            wanted.insert(0, ("cudnn+flash", why))
    failures: list[str] = []
    for kind, reason in wanted:
        failure = try_attention(kind, heads, device, dtype)
        if failure is None:
            return AttentionChoice(kind, "; ".join([reason, *failures]))
        failures.append(f"{kind} does not run: {failure}")
    raise ModelError(
        f"no fast attention for {num_heads} query heads on {num_kv_heads} key/value heads of size {head_size}: "
        + "; ".join(failures),
        "engine.attention=any takes PyTorch's slower kernels" if asked == "auto" else "use engine.attention=auto",
    )


def try_attention(
    kind: AttentionKind, heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Runs it forward and backward on a few tokens; None if values and gradients are right, else what went wrong."""
    for bounds in _TRIED_BOUNDS[:1] if kind == "cudnn" else _TRIED_BOUNDS:
        qkv = _random_qkv(bounds[-1], heads, device, dtype)
        exact = [x.detach().float().requires_grad_() for x in qkv]
        documents = _documents(bounds, kind, device)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                got = _with_gradients(qkv, documents)
                torch.cuda.synchronize(device)
            except Exception as e:  # whatever a library finds wrong is an answer here
                reasons = [str(w.message).split(" (Triggered")[0].strip() for w in said]
                return " ".join(dict.fromkeys([str(e).splitlines()[0], *reasons]))
        for a, b in zip(got, _with_gradients(exact, documents), strict=True):
            error = ((a.float() - b).norm() / b.norm()).item()
            if not error < _TOLERANCE:
                return f"it is wrong by {error:.1%}"
    return None


def _documents(bounds: tuple[int, ...], kind: AttentionKind, device: torch.device) -> Documents:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    return Documents(cu_seqlens, bounds, bounds[-1], (), kind)


def _random_qkv(
    num_tokens: int, heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    N, K, H = heads
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    sizes = [(num_tokens, n, H) for n in (N, K, K)]
    return [torch.randn(s, device=device, generator=generator).to(dtype).requires_grad_() for s in sizes]


def _with_gradients(qkv: list[torch.Tensor], documents: Documents) -> tuple[torch.Tensor, ...]:
    q, k, v = qkv
    out = attention(q, k, v, documents)
    return (out, *torch.autograd.grad(out, qkv, torch.ones_like(out)))
