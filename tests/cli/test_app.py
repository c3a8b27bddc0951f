from __future__ import annotations

import subprocess
import sys

import pytest


def fp8ctl(*words: str, cwd=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fp8ctl", *words], capture_output=True, text=True, cwd=cwd)


def test_version_and_help() -> None:
    assert fp8ctl("--version").stdout.startswith("fp8ctl 0.")
    out = fp8ctl("--help").stdout
    for command in ("doctor", "model", "data", "train", "monitor", "eval", "bench", "report", "export"):
        assert command in out


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (
            ["train", "cpt", "optim.peek_lr=1"],
            "error: optim.peek_lr: unknown setting",
            "hint: did you mean optim.peak_lr?",
        ),
        (
            ["train", "cpt", "precision=fp9"],
            "error: precision: no choice named 'fp9'",
            "hint: precision can be bf16, infir2",
        ),
        (["train", "cpt", "optim.peak_lr=fast"], "error: optim.peak_lr: input should be a valid number", ""),
        (["train", "cpt", "model=tiny"], "error: data.path: no data", "hint: set data.path=FOLDER"),
        (
            ["train", "cpt", "model.path=/nowhere", "data.path=x"],
            "error: model.path: /nowhere does not exist",
            "hint: give a Hugging Face folder",
        ),
        (["train", "cpt", "--resume"], "error: --resume needs the run", "hint: add --run-dir"),
        (
            ["train", "cpt", "--resume", "--run-dir", "nothing-here"],
            "error: nothing to resume: no run in nothing-here",
            "hint: ",
        ),
        (["data", "prep", "source=python_stdlib"], "out: no folder to write to", "tokenizer=FOLDER"),
        (["report", "nothing-here"], "error: no run folder: nothing-here", "hint: give the folder"),
        (["monitor", "show", "nothing-here"], "error: no run folder: nothing-here", "hint: give the folder"),
        (["export", "nothing-here", "out"], "error: nothing-here does not exist", "hint: give a run folder"),
    ],
)
def test_a_users_mistake_is_one_error_and_one_hint(tmp_path, words, error, hint) -> None:
    done = fp8ctl(*words, cwd=tmp_path)
    assert error in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.returncode == (1 if words[0] == "export" else 2)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_verbose_shows_the_traceback(tmp_path) -> None:
    done = fp8ctl("train", "cpt", "model=tiny", "-v", cwd=tmp_path)
    assert "Traceback" in done.stderr
    assert "error: data.path: no data" in done.stderr


def test_an_unknown_command_is_refused() -> None:
    done = fp8ctl("trian", "cpt")
    assert done.returncode == 2
    assert "No such command 'trian'" in done.stderr
