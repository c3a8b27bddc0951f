"""Imports go down: the table of layers as data, and the walk that enforces it."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fp8ctl

ROOT = Path(fp8ctl.__file__).parent
ROWS = [
    ["errors", "paths"],
    ["config", "track"],
    ["data", "model", "fp8"],
    ["precision"],
    ["engine", "monitor"],
    ["train", "eval"],
    ["bench", "plan", "worker"],
    ["launch", "report", "doctor"],
    ["cli"],
]
LEVEL = {part: level for level, row in enumerate(ROWS) for part in row}
HEAVY = {"torch", "deepspeed", "transformer_engine", "mlflow", "transformers", "triton"}
LIGHT_ROWS = {0, 1, 7, 8}
EXEMPT = {"__init__.py", "__main__.py"}  # the package's own two files: they map public names and start the command line


def parts_and_files() -> list[tuple[str, Path]]:
    files = [f for f in ROOT.rglob("*.py") if f.relative_to(ROOT).parts[0] not in EXEMPT]
    return [(f.relative_to(ROOT).parts[0].removesuffix(".py"), f) for f in files]


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def module_level(tree: ast.Module) -> list[str]:
    """Imports that run when the module is imported: everything outside functions and `if TYPE_CHECKING`."""
    found, todo = [], list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found += imported(node)
        todo += list(ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize(
    ("part", "file"), parts_and_files(), ids=lambda v: v if isinstance(v, str) else v.relative_to(ROOT).as_posix()
)
def test_imports_go_down(part: str, file: Path) -> None:
    assert part in LEVEL, f"{part} is in no row of the table"
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        for name in imported(node):
            if not name.startswith("fp8ctl."):
                continue
            target = name.split(".")[1]
            if target == "__version__":
                continue
            assert target in LEVEL, f"{file}: {name} is in no row"
            assert target == part or LEVEL[target] < LEVEL[part], f"{file}: {part} may not import {target}"
    if LEVEL[part] in LIGHT_ROWS:
        heavy = {name.split(".")[0] for name in module_level(tree)} & HEAVY
        assert not heavy, f"{file} imports {heavy} at module level"


def test_the_walk_sees_what_it_forbids() -> None:
    tree = ast.parse(
        "import torch\nclass A:\n    import mlflow\ndef f():\n    import deepspeed\nif TYPE_CHECKING:\n    import triton\n"
    )
    assert set(module_level(tree)) == {"torch", "mlflow"}
    assert imported(ast.parse("from fp8ctl.cli import app").body[0]) == ["fp8ctl.cli.app"]


def test_files_and_functions_are_small() -> None:
    for _, file in parts_and_files():
        text = file.read_text()
        assert text.count("\n") <= 400, f"{file} is longer than 400 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= (100 if file.name == "loop.py" else 75), f"{file}: {node.name} has {length} lines"


def test_help_needs_no_torch_and_little_time() -> None:
    code = "import sys; from fp8ctl.cli.app import app; assert not {'torch', 'deepspeed', 'mlflow', 'hydra'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    fastest = float("inf")
    for _ in range(3):  # the fastest of three: a busy machine must not fail a test of what is imported
        start = time.perf_counter()
        out = subprocess.run(
            [sys.executable, "-m", "fp8ctl", "--help"], check=True, capture_output=True, text=True
        ).stdout
        fastest = min(fastest, time.perf_counter() - start)
    assert "train" in out
    assert fastest < 3.0  # well under 0.5 s on an idle core; the bound only catches a heavy import


def test_public_names_are_these() -> None:
    assert sorted(fp8ctl.__all__) == sorted(
        [
            "__version__", "Fp8ctlError", "compose", "TrainConfig", "EvalConfig", "DataPrepConfig", "PrecisionConfig", "MonitorConfig",
            "ModelShape", "RunRecord", "StepStats", "quantize_tile", "quantize_block", "dequantize", "gemm_nt", "Fp8Linear",
            "PrecisionPlan", "make_plan", "apply_plan", "coverage", "StabilityMonitor", "Decision", "Transformer", "load_hf", "save_hf",
        ]
    )  # fmt: skip
    for name in fp8ctl.__all__:
        assert getattr(fp8ctl, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fp8ctl.nothing
