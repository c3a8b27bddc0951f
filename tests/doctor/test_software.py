from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fp8ctl.doctor import software
from fp8ctl.doctor.finding import Answer, in_words
from fp8ctl.fp8 import reference


@pytest.fixture
def versions(monkeypatch):
    """versions(torchao="0.18.0"): these are installed, nothing else."""

    def pretend(**installed: str) -> None:
        def version(name: str) -> str:
            try:
                return installed[name.replace("-", "_")]
            except KeyError:
                raise importlib.metadata.PackageNotFoundError(name) from None

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


@pytest.fixture
def imports(monkeypatch):
    """imports(error): every import that a check tries fails so; None lets it pass."""

    def pretend(error: Exception | None) -> None:
        def import_module(name: str) -> object:
            if error is not None:
                raise error
            return SimpleNamespace()

        monkeypatch.setattr(importlib, "import_module", import_module)

    return pretend


def test_torch_says_what_it_was_built_for(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert software.torch() == Answer("ok", "2.11.0+cu130, CUDA 13.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert software.torch() == Answer("ok", "2.11.0+cu130, CPU build")


def test_a_wrong_round_trip_is_broken(monkeypatch) -> None:
    assert software.fp8_reference() == Answer("ok", "quantised a tile and back, largest error 0.124 of 3")
    monkeypatch.setattr(reference, "dequantize", lambda codes, scale_inv: codes.float() * scale_inv * 2)
    answer = software.fp8_reference()
    assert (answer.state, answer.fix) == ("broken", "report this with `fp8ctl doctor --json`")
    monkeypatch.setattr(reference, "dequantize", lambda codes, scale_inv: torch.full(codes.shape, torch.nan))
    assert software.fp8_reference().detail == "a round trip is off by nan"


def test_gloo_reduces_a_tensor(monkeypatch) -> None:
    # In a process of its own, as doctor does: this one may have a process group already
    code = "import torch.distributed as d; from fp8ctl.doctor import software as s; print(s.gloo(), d.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{Answer('ok', 'one rank reduced a tensor on the CPU')} False"
    monkeypatch.setattr(software, "one_rank_sum", lambda backend, device: 5.0)
    assert software.gloo() == Answer("broken", "a sum over one rank gave 5 for 4", "reinstall torch")
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert software.gloo() == Answer("absent", "torch was built without it", "install a torch build with gloo")


def test_hydra_composes_and_names_a_wrong_antlr(versions, imports) -> None:
    assert software.hydra().detail.endswith(", conf/ composes")
    versions(antlr4_python3_runtime="4.13.2", hydra_core="1.3.8")
    assert software.hydra() == Answer(
        "broken",
        "antlr4-python3-runtime 4.13.2; Hydra 1.3 needs 4.9",
        "pip install antlr4-python3-runtime==4.9.3",
    )
    versions(antlr4_python3_runtime="4.9.3")
    assert software.hydra() == Answer("absent", "not installed", "pip install -c constraints.txt hydra-core")
    versions(hydra_core="1.3.8")
    imports(ModuleNotFoundError("No module named 'antlr4'"))
    assert software.hydra().detail == "1.3.8 does not import: ModuleNotFoundError: No module named 'antlr4'"


@pytest.mark.parametrize(
    ("check", "installed", "fix"),
    [
        (software.deepspeed, {"deepspeed": "0.19.8"}, "pip install -c constraints.txt deepspeed"),
        (software.tokenizers, {"tokenizers": "0.23.3"}, "pip install -c constraints.txt tokenizers"),
        (software.mlflow, {"mlflow": "3.17.2"}, "pip install -c constraints.txt mlflow, or run with track=jsonl"),
        (
            software.mlflow,
            {"mlflow_skinny": "3.17.2"},
            "pip install -c constraints.txt mlflow, or run with track=jsonl",
        ),
        (
            software.reasoning_gym,
            {"reasoning_gym": "0.1.25"},
            "pip install -c constraints.txt reasoning-gym (generated questions and evaluation need it)",
        ),
        (
            software.transformers,
            {"transformers": "5.17.0"},
            "pip install transformers (for the benchmark's comparison only)",
        ),
        (software.torchao, {"torchao": "0.18.0"}, "pip install torchao (for the benchmark's comparison only)"),
    ],
)
def test_packages_are_there_absent_or_broken(versions, imports, check, installed, fix) -> None:
    (number,) = installed.values()
    versions(**installed)
    imports(None)
    assert check() == Answer("ok", number)
    imports(ImportError("libcudart.so.12: cannot open shared object file\nmore"))
    assert check() == Answer(
        "broken",
        f"{number} does not import: ImportError: libcudart.so.12: cannot open shared object file",
        fix,
    )
    versions()
    answer = check()
    assert (answer.state, answer.fix) == ("absent", fix)
    assert answer.detail.startswith("not installed")


def test_absent_arms_say_what_the_benchmark_does_without(versions) -> None:
    versions()
    assert software.torchao().detail == (
        "not installed: `fp8ctl bench step` leaves out torchao-tensorwise and torchao-rowwise"
    )
    assert software.liger_kernel() == Answer(
        "note", "not installed, and nothing needs it: all arms have the same loss head"
    )


def test_a_broken_liger_is_named_though_nothing_needs_it(versions, imports) -> None:
    versions(liger_kernel="0.8.5")
    imports(None)
    assert software.liger_kernel() == Answer("ok", "0.8.5")
    imports(ImportError("triton"))
    assert software.liger_kernel().fix == "pip uninstall liger-kernel (nothing needs it)"


@pytest.fixture
def ops(monkeypatch):
    """ops(installed, gpu error): a DeepSpeed with these ops prebuilt; the error is that of its look for nvcc."""

    def pretend(installed: dict[str, bool], mismatch: Exception | None = None, *, gpu: bool = True) -> None:
        def look(name: str = "") -> bool:
            print("DeepSpeed talks")
            if mismatch is not None:
                raise mismatch
            return True

        builder = SimpleNamespace(is_compatible=lambda verbose: True)
        modules = {
            "deepspeed": SimpleNamespace(),
            "deepspeed.git_version_info": SimpleNamespace(installed_ops=installed),
            "deepspeed.ops": SimpleNamespace(),
            "deepspeed.ops.op_builder": SimpleNamespace(),
            "deepspeed.ops.op_builder.all_ops": SimpleNamespace(ALL_OPS={"fused_adam": builder, "cpu_adam": builder}),
            "deepspeed.ops.op_builder.builder": SimpleNamespace(assert_no_cuda_mismatch=look),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(software.shutil, "which", lambda name: f"/usr/bin/{name}")

    return pretend


def test_ops_that_are_prebuilt_or_could_be_built(ops, capsys) -> None:
    unused = "fp8ctl uses none of them"
    ops({"fused_adam": True, "cpu_adam": False})
    assert software.deepspeed_ops() == Answer(
        "note", f"prebuilt: fused_adam; FusedAdam and CPUAdam could be built; {unused}"
    )
    assert capsys.readouterr().out == ""
    ops({"fused_adam": False}, gpu=False)
    assert software.deepspeed_ops().detail == f"none prebuilt; FusedAdam and CPUAdam could be built; {unused}"
    ops({}, RuntimeError(">- DeepSpeed Op Builder: CUDA_HOME does not exist, unable to compile CUDA op(s)"))
    assert software.deepspeed_ops().detail == (
        "none prebuilt; none could be built (DeepSpeed Op Builder: CUDA_HOME does not exist, unable to compile CUDA op(s));"
        f" {unused}"
    )


def test_ops_without_tools_or_without_deepspeed(ops, versions, monkeypatch) -> None:
    ops({})
    versions(deepspeed="0.19.8")
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    assert "none could be built (no ninja)" in software.deepspeed_ops().detail
    versions(deepspeed="0.19.8", ninja="1.13.2")
    assert "none could be built (no C++ compiler)" in software.deepspeed_ops().detail
    versions()
    assert software.deepspeed_ops() == Answer("skipped", "DeepSpeed is absent")


def test_errors_in_words_are_one_line() -> None:
    assert in_words(RuntimeError("one\ntwo")) == "RuntimeError: one"
    assert in_words(KeyError()) == "KeyError: "
    assert len(in_words(ValueError("x" * 1000))) == 200
