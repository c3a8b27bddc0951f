import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fp8ctl.track.environment import collect_environment, git_state, package_versions


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_facts_are_plain_json_and_true(tmp_path: Path) -> None:
    env = collect_environment(
        gpus=[{"name": "H200", "memory_bytes": 7}], argv=["fp8ctl", "--token", "abc"], folder=tmp_path
    )
    assert json.loads(json.dumps(env)) == env
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["packages"]["numpy"] == metadata.version("numpy")
    assert env["gpus"] == [{"name": "H200", "memory_bytes": 7}]
    assert env["command"] == ["fp8ctl", "--token", "[redacted]"]
    assert 1 <= env["cpu"]["usable_cores"] <= env["cpu"]["cores"] and env["cpu"]["model"]
    assert env["memory_bytes"] > 100_000_000


def test_environment_variables_are_a_short_list_and_redacted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a1" * 17)
    monkeypatch.setenv("MY_VARIABLE", "private")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("TORCH_PROXY", "http://me:secret-word@proxy:3128")
    monkeypatch.setenv("TORCH_API_KEY", "0123456789abcdef")
    variables = collect_environment(argv=[], folder=tmp_path)["variables"]
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables["TORCH_PROXY"] == "http://[redacted]@proxy:3128"
    assert variables["TORCH_API_KEY"] == "[redacted]"
    assert "HF_TOKEN" not in variables and "MY_VARIABLE" not in variables


def test_commit_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("FP8CTL_COMMIT", raising=False)
    assert git_state(tmp_path) == {"commit": None, "is_dirty": None}
    monkeypatch.setenv("FP8CTL_COMMIT", "abc123")
    assert git_state(tmp_path) == {"commit": "abc123", "is_dirty": None}
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("x")
    assert git_state(tmp_path) == {"commit": commit, "is_dirty": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "is_dirty": True}


def test_a_machine_without_git_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FP8CTL_COMMIT", "abc123")
    assert git_state(tmp_path)["commit"] == "abc123"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, fp8ctl.track.sinks, fp8ctl.track.environment as e; e.collect_environment();"
        "print([m for m in ('torch', 'deepspeed', 'mlflow', 'transformers', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
    )


def test_absent_packages_are_left_out() -> None:
    assert package_versions(("pytest", "no-such-distribution")) == {"pytest": metadata.version("pytest")}
