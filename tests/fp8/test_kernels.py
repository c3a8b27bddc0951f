"""The Triton quantisers equal the specification bit for bit: on a GPU, or on a CPU under TRITON_INTERPRET=1.

Triton's interpreter rounds FP8 casts in its own way and loses subnormal BF16, so there PyTorch's casts take its place;
everything else is the kernel's own. On a GPU nothing is replaced.
"""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch

from fp8ctl.fp8 import reference
from fp8ctl.fp8.formats import E4M3, FORMATS, Fp8Format

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if ON_GPU and not INTERPRETED else "cpu"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1"),
]
SHAPES = [(128, 128), (256, 128), (132, 256), (130, 200), (1, 1), (16, 300), (127, 129)]
if DEVICE == "cuda":
    SHAPES += [(1000, 576), (4096, 1536), (17, 192), (1, 8960)]
CASES = [
    (fmt, kind, dtype)
    for fmt in FORMATS.values()
    for kind in ("pow2", "fp32")
    for dtype in (torch.bfloat16, torch.float32)
]


def case_name(value: object) -> str:
    return value.name if isinstance(value, Fp8Format) else str(value).removeprefix("torch.")


@pytest.fixture(autouse=True)
def exact_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def cast(data: object, source: object, target: object, rounding: object) -> object:
        dtype = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}.get(str(target))
        if dtype is not None:  # as the hardware does it: every NaN has one code
            x = torch.from_numpy(data)  # type: ignore[arg-type]
            return torch.where(x.isnan(), 0x7F, x.to(dtype).view(torch.uint8)).numpy()
        if (str(source), str(target)) == ("bf16", "fp32"):
            return (data.astype("uint32") << 16).view("float32")  # type: ignore[attr-defined]
        if (str(source), str(target)) == ("fp32", "bf16"):
            return torch.from_numpy(data).to(torch.bfloat16).view(torch.uint16).numpy()  # type: ignore[arg-type]
        return convert(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", cast)


def awkward(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """All magnitudes from subnormal to the largest, exact ties, zeros of both signs, inf, NaN, whole tiles of each."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    exponents = torch.randint(-150, 128, (rows, 1), generator=generator)
    exponents = exponents + torch.randint(-20, 21, (rows, columns), generator=generator)
    x = torch.ldexp(torch.randn(rows, columns, generator=generator).double(), exponents).clamp(-3.4e38, 3.4e38).float()
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0.0
    x[torch.rand(x.shape, generator=generator) < 0.1] *= -0.0
    for value in (math.inf, -math.inf, math.nan, -math.nan):
        x[torch.rand(x.shape, generator=generator) < 5e-4] = value
    if rows > 100:
        x[3], x[4], x[5], x[6] = 0.0, torch.finfo(torch.float32).max, math.inf, 2.0**-149
        x[7] = torch.arange(columns) * 0.5 + 0.25  # ties of the rounding
        x[8] = -(2.0**-133)
        x[9], x[9, 0] = -0.0, 1e-30
        x[10:, :2] = 0.0
    return x.to(dtype)


def assert_same(got: reference.Quantized, wanted: reference.Quantized) -> None:
    assert got.codes.shape == wanted.codes.shape and got.scale_inv.shape == wanted.scale_inv.shape
    assert torch.equal(got.scale_inv.cpu().view(torch.int32), wanted.scale_inv.contiguous().view(torch.int32))
    assert torch.equal(got.codes.cpu().view(torch.uint8), wanted.codes.contiguous().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "kind", "dtype"), CASES, ids=case_name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantisers_equal_the_reference(fmt: Fp8Format, kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    from fp8ctl.fp8 import kernels

    x = awkward(*shape, dtype)
    on_device = x.to(DEVICE)
    by_tile, by_block = reference.quantize_tile(x, fmt, kind), reference.quantize_block(x, fmt, kind)  # type: ignore[arg-type]
    across = reference.quantize_tile(x.t(), fmt, kind)  # type: ignore[arg-type]

    assert_same(kernels.quantize_tile(on_device, fmt, kind), by_tile)  # type: ignore[arg-type]
    assert_same(kernels.quantize_block(on_device, fmt, kind), by_block)  # type: ignore[arg-type]
    both = kernels.quantize_tile_both(on_device, fmt, kind)  # type: ignore[arg-type]
    assert_same(both[0], by_tile)
    assert_same(both[1], across)
    assert_same(kernels.quantize_tile_transposed(on_device, fmt, kind), across)  # type: ignore[arg-type]
    transposed = kernels.quantize_block(on_device, fmt, kind, transposed=True)  # type: ignore[arg-type]
    assert_same(transposed, by_block.t())
    assert both[0].codes.is_contiguous() and both[1].codes.is_contiguous() and transposed.codes.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(130, 200), (1, 128)], ids=str)
def test_padding_is_zero_with_scale_one(shape: tuple[int, int]) -> None:
    from fp8ctl.fp8 import kernels

    x = awkward(*shape, torch.bfloat16)
    rows, columns = (-(-size // 16) * 16 for size in shape)
    padded = torch.zeros(rows, columns, dtype=torch.bfloat16)
    padded[: shape[0], : shape[1]] = x
    both = kernels.quantize_tile_both(x.to(DEVICE), pad_to=16)
    assert_same(both[0], reference.quantize_tile(padded))
    assert_same(both[1], reference.quantize_tile(padded.t()))
    assert_same(kernels.quantize_block(x.to(DEVICE), pad_to=16), reference.quantize_block(padded))


@pytest.mark.gpu
def test_what_the_kernels_refuse_and_what_is_empty() -> None:
    from fp8ctl.fp8 import kernels

    with pytest.raises(ValueError, match="expected a contiguous matrix"):
        kernels.quantize_tile(torch.zeros(4, 8, device=DEVICE).t())
    with pytest.raises(ValueError, match="expected a matrix of float32"):
        kernels.quantize_block(torch.zeros(4, device=DEVICE))
    empty = kernels.quantize_tile_both(torch.zeros(0, 576, device=DEVICE))
    assert empty[0].codes.shape == (0, 576) and empty[1].codes.shape == (576, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "kind", "dtype"), CASES, ids=case_name)
@pytest.mark.parametrize("shape", [(256, 128), (132, 256), (130, 200), (1, 128)], ids=str)
def test_scales_by_row_and_by_tensor(fmt: Fp8Format, kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    from fp8ctl.fp8 import kernels

    x = awkward(*shape, dtype)
    for quantize, wanted in (
        (kernels.quantize_row, reference.quantize_row),
        (kernels.quantize_tensor, reference.quantize_tensor),
    ):
        rows, columns = quantize(x.to(DEVICE), fmt, kind, rows=True, columns=True)  # type: ignore[arg-type]
        assert rows is not None and columns is not None
        assert_same(rows, wanted(x, fmt, kind))  # type: ignore[arg-type]
        assert_same(columns, wanted(x.t(), fmt, kind))  # type: ignore[arg-type]
        assert rows.codes.is_contiguous() and columns.codes.is_contiguous()
        alone = quantize(x.to(DEVICE), fmt, kind, rows=False, columns=True)  # type: ignore[arg-type]
        assert alone.rows is None and alone.columns is not None
        assert_same(alone.columns, wanted(x.t(), fmt, kind))  # type: ignore[arg-type]
        padded = torch.zeros(*(-(-size // 16) * 16 for size in shape), dtype=dtype)
        padded[: shape[0], : shape[1]] = x
        both = quantize(x.to(DEVICE), fmt, kind, rows=True, columns=True, pad_to=16)  # type: ignore[arg-type]
        assert both.rows is not None and both.columns is not None
        assert_same(both.rows, wanted(padded, fmt, kind))  # type: ignore[arg-type]
        assert_same(both.columns, wanted(padded.t(), fmt, kind))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=case_name)
@pytest.mark.parametrize("rows", [256, 150])
@pytest.mark.parametrize("widths", [(256, 128), (128, 256, 128), (128, 128, 128, 128), (128, 72)], ids=str)
def test_parts_are_one_matrix(dtype: torch.dtype, rows: int, widths: tuple[int, ...]) -> None:
    from fp8ctl.fp8 import kernels

    parts = [awkward(rows, width, dtype) for width in widths]
    whole = torch.cat(parts, dim=1)
    got = kernels.quantize_tile_both([part.to(DEVICE) for part in parts])
    assert_same(got[0], reference.quantize_tile(whole))
    assert_same(got[1], reference.quantize_tile(whole.t()))
    weights = [part.t().contiguous() for part in parts]
    for transposed in (False, True):
        joined = kernels.quantize_block([w.to(DEVICE) for w in weights], transposed=transposed)
        wanted = reference.quantize_block(whole.t())
        assert_same(joined, wanted.t() if transposed else wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("by_tensor", [True, False])
@pytest.mark.parametrize(
    ("axis", "shapes"), [(0, [(256, 128), (128, 128)]), (1, [(132, 256), (132, 128)]), (0, [(64, 128), (192, 128)])]
)
def test_parts_share_scales_as_if_they_were_one_matrix(
    axis: int, shapes: list[tuple[int, int]], by_tensor: bool
) -> None:
    from fp8ctl.fp8 import kernels

    parts = [awkward(*shape, torch.bfloat16) for shape in shapes]
    whole = torch.cat(parts, axis)
    quantize = kernels.quantize_tensor if by_tensor else kernels.quantize_row
    wanted = reference.quantize_tensor if by_tensor else reference.quantize_row
    got = quantize([part.to(DEVICE) for part in parts], E4M3, "fp32", axis=axis, rows=True, columns=True)
    assert got.rows is not None and got.columns is not None
    assert_same(got.rows, wanted(whole, E4M3, "fp32"))
    assert_same(got.columns, wanted(whole.t(), E4M3, "fp32"))
