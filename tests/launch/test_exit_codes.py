from __future__ import annotations

import json

import pytest

from fp8ctl.launch.exit_codes import cause_of_death
from fp8ctl.paths import RunPaths


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    (tmp_path / "logs").mkdir()
    return RunPaths(tmp_path)


def leave(paths: RunPaths, rank: int, time: float, message: str, hint: str = "", code: int = 1) -> None:
    report = {"rank": rank, "time": time, "message": message, "hint": hint, "exit_code": code}
    paths.rank_error(rank).write_text(json.dumps(report))


def test_the_first_rank_to_die_is_the_culprit(paths) -> None:
    leave(paths, 0, 20.0, "connection closed by peer")
    leave(paths, 1, 10.0, "disk full", "free space", 2)
    assert cause_of_death(paths, 1) == ("rank 1: disk full", "free space", 2)


def test_without_a_hint_the_log_is_named(paths) -> None:
    leave(paths, 1, 10.0, "ValueError: odd")
    assert cause_of_death(paths, 1)[1] == f"see {paths.rank_log(1)}"


def test_a_half_written_report_is_passed_over(paths) -> None:
    paths.rank_error(0).write_text('{"rank": 0, "ti')
    leave(paths, 1, 5.0, "really")
    assert cause_of_death(paths, 1)[0] == "rank 1: really"


def test_a_kill_for_memory_is_named_from_the_launchers_log(paths) -> None:
    (paths.logs / "launcher.log").write_text("[ERROR] ['python'] exits with return code = -9\n")
    cause, hint, code = cause_of_death(paths, 247)
    assert "killed (signal 9)" in cause
    assert "memory" in cause
    assert "micro_batch_rows" in hint
    assert code == 1


@pytest.mark.parametrize(
    ("launcher_code", "word"), [(135, "bus error"), (139, "crashed in native code"), (134, "aborted"), (143, "SIGTERM")]
)
def test_signals_in_exit_codes_are_read(paths, launcher_code, word) -> None:
    assert word in cause_of_death(paths, launcher_code)[0]


def test_a_silent_end_is_a_failure_even_with_code_0(paths) -> None:
    cause, hint, code = cause_of_death(paths, 0)
    assert "left no status" in cause
    assert str(paths.logs) in hint
    assert code == 1
