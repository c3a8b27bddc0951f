"""A compiled kernel is called again only with arguments of the kind that it was compiled for."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Kernel:
    """Stands in for a Triton kernel: what it is compiled for and what it is called with."""

    def __init__(self) -> None:
        self.compiled: list[tuple[object, ...]] = []
        self.called: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def compile_and_run(*args: object, **named: object) -> Kernel:
            self.compiled.append((grid, args, named))
            return Compiled(self)  # type: ignore[return-value]

        return compile_and_run


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *args: self.kernel.called.append((grid, args))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> object:
    import triton

    from fp8ctl.fp8.launch import launch

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    return launch


def test_the_same_kind_is_compiled_once(launch) -> None:  # type: ignore[no-untyped-def]
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, 4, x, 32, constants={"FLAG": True}, num_warps=8)
    launch(kernel, 5, torch.ones(64), 48, constants={"FLAG": True}, num_warps=8)
    assert len(kernel.compiled) == 1 and kernel.compiled[0][2] == {"FLAG": True, "num_warps": 8}
    ((grid, args),) = kernel.called
    assert grid == (5, 1, 1) and args[1:] == (48, True)


@pytest.mark.parametrize(
    ("first", "size", "constants", "options"),
    [
        (torch.zeros(64, dtype=torch.bfloat16), 32, {"FLAG": True}, {"num_warps": 8}),  # another dtype
        (torch.zeros(64)[1:], 32, {"FLAG": True}, {"num_warps": 8}),  # not aligned
        (torch.zeros(64), 33, {"FLAG": True}, {"num_warps": 8}),  # no multiple of 16
        (torch.zeros(64), 1, {"FLAG": True}, {"num_warps": 8}),  # 1, which Triton builds in
        (torch.zeros(64), 2**33, {"FLAG": True}, {"num_warps": 8}),  # 64 bits
        (torch.zeros(64), 32, {"FLAG": False}, {"num_warps": 8}),
        (torch.zeros(64), 32, {"FLAG": True}, {"num_warps": 4}),
        (torch.zeros(64), 32, {"FLAG": True}, {"num_warps": 8, "maxnreg": 128}),
    ],
)
def test_another_kind_is_compiled_anew(launch, first, size, constants, options) -> None:  # type: ignore[no-untyped-def]
    kernel = Kernel()
    launch(kernel, 4, torch.zeros(64), 32, constants={"FLAG": True}, num_warps=8)
    launch(kernel, 4, first, size, constants=constants, **options)
    assert len(kernel.compiled) == 2 and not kernel.called
