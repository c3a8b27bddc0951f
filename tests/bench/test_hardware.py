"""Datasheet peaks, the device, the copy."""

from __future__ import annotations

import pytest
import torch

from fp8ctl.bench.clock import Clock
from fp8ctl.bench.hardware import choose_device, copy_bandwidth, device_name, environment, peak_of
from fp8ctl.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", "H200 SXM dense BF16 989 TFLOP/s"),
        ("NVIDIA H200 NVL", "H200 NVL dense BF16 835 TFLOP/s"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM dense BF16 989 TFLOP/s"),
        ("NVIDIA H100 PCIe", "H100 PCIe dense BF16 756 TFLOP/s"),
    ],
)
def test_peaks_have_names_and_agree_with_them(device: str, peak: str) -> None:
    found = peak_of(device)
    assert found is not None
    assert found.name == peak
    assert f" {found.flops / 1e12:.0f} TFLOP/s" in found.name


def test_no_peak_is_made_up() -> None:
    assert peak_of("NVIDIA GeForce GTX 1080") is None
    assert peak_of(None) is None


def test_the_cpu() -> None:
    device = choose_device("cpu")
    assert device_name(device) is None
    assert environment(device)["gpus"] == []
    assert 1e-4 < copy_bandwidth(Clock(device), rounds=1) < 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no GPU") as caught:
        choose_device("cuda")
    assert caught.value.hint == "run `fp8ctl doctor`, or set device=auto"
