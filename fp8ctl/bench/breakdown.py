"""Which kernels take the time of a step: torch's profiler over one of them, kernels put into groups by their names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

GROUPS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|sdpa|attn|attention|cudnn_generated"),
    ("swiglu", r"swiglu|silu|^(forward|backward)(_bf16)?$"),
    ("quantise", r"quantize|quantise|amax|to_fp8|_tile_kernel|_row_kernel|cast_transpose"),
    (
        "GEMM FP8",
        r"e4m3|e5m2|fp8.*(gemm|mm)|block_gemm|(gemm|nvjet|cutlass|wgmma).*(fp8|qq|e4m3)|nvjet_qq|nvjet_sm90_qq",
    ),
    ("GEMM BF16", r"gemm|nvjet|cutlass|cublas|matmul"),
    ("loss", r"softmax|cross_entropy|logsumexp|nll|loss"),
    ("norm, rope", r"norm|rope|rotary|rsqrt|rotate"),
    ("optimizer", r"adam|multi_tensor"),
)
"""Name of a group and what its kernels' names hold; the first that fits decides."""
OTHER = "other"
_TOP = 15


def group_of(kernel: str) -> str:
    """The group of a kernel by its name."""
    return next((name for name, pattern in GROUPS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def kernel_rows(arm: str, step: Callable[[], Any]) -> list[dict[str, Any]]:
    """Runs one step under the profiler; GPU time of each group, and the kernels that take most."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [
        (event.key, event.self_device_time_total / 1e3, event.count)
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total > 0
    ]
    return rows_of(arm, kernels)


def rows_of(arm: str, kernels: list[tuple[str, float, int]]) -> list[dict[str, Any]]:
    """Rows from (name, milliseconds, calls) of each kernel."""
    total = sum(ms for _, ms, _ in kernels)
    sums: dict[str, list[float]] = {}
    for name, ms, count in kernels:
        entry = sums.setdefault(group_of(name), [0.0, 0.0])
        entry[0] += ms
        entry[1] += count
    rows: list[dict[str, Any]] = [
        {"table": "kernels by group", "arm": arm, "group": group, "ms": ms, "share": ms / total, "calls": int(count)}
        for group, (ms, count) in sorted(sums.items(), key=lambda item: -item[1][0])
    ]
    top = sorted(kernels, key=lambda kernel: -kernel[1])[:_TOP]
    return rows + [
        {
            "table": "longest kernels",
            "arm": arm,
            "kernel": name[:120],
            "group": group_of(name),
            "ms": ms,
            "calls": count,
        }
        for name, ms, count in top
    ]
