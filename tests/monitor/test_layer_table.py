import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fp8ctl
from fp8ctl.monitor import layer_table
from fp8ctl.monitor.layer_table import LayerRow, LayerTable, read_layers


def rows(step: int, value: float = 0.5, fqns: tuple[str, ...] = ("a", "b")) -> list[LayerRow]:
    return [LayerRow(step, fqn, role, "fp8", value, 0.25, 0.125, 31.5) for fqn in fqns for role in ("input", "weight")]


def steps_of(path: Path) -> list[int]:
    return sorted(set(read_layers(path)["step"].to_pylist()))


def test_rows_come_back_in_order_and_exact(tmp_path: Path) -> None:
    table = LayerTable(tmp_path / "layers.parquet", flush_s=0)
    table.append(rows(10))
    table.append([LayerRow(20, "a", "grad_output", "bf16", math.inf, 0.0, 1.0, math.nan)])
    read = read_layers(tmp_path / "layers.parquet")
    assert read.column_names == list(LayerRow._fields)
    *first, last = [LayerRow(**row) for row in read.to_pylist()]
    assert first == rows(10)
    assert last[:5] == (20, "a", "grad_output", "bf16", math.inf) and math.isnan(last.sqnr_db)


def test_no_folder_and_no_rows(tmp_path: Path) -> None:
    table = LayerTable(tmp_path / "layers.parquet")
    table.append([])
    table.flush()
    assert not (tmp_path / "layers.parquet").exists()
    assert read_layers(tmp_path / "layers.parquet").num_rows == 0


def test_rows_wait_for_a_while_then_are_written(tmp_path: Path) -> None:
    table = LayerTable(tmp_path, flush_s=3600)
    table.append(rows(10))
    assert steps_of(tmp_path) == []
    table.flush()
    assert steps_of(tmp_path) == [10]
    table.flush()
    assert len(list(tmp_path.iterdir())) == 1


def test_parts_are_merged_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_table, "MERGE_PARTS", 4)
    for restart in range(3):  # reopened twice: numbering and merging go on
        table = LayerTable(tmp_path, flush_s=0)
        for step in range(restart * 5 + 1, restart * 5 + 6):
            table.append(rows(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "part-00000000-00000003.parquet",
        "part-00000004-00000007.parquet",
        "part-00000008-00000011.parquet",
        "part-00000012-00000012.parquet",
        "part-00000013-00000013.parquet",
        "part-00000014-00000014.parquet",
    ]
    read = read_layers(tmp_path)
    assert read.num_rows == 15 * 4 and read["step"].to_pylist() == [s for s in range(1, 16) for _ in range(4)]


def test_a_kill_between_merge_and_removal_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = LayerTable(tmp_path, flush_s=0)
    for step in range(1, 4):
        table.append(rows(step))
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(layer_table, "MERGE_PARTS", 4)
    table.append(rows(4))
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    assert read_layers(tmp_path).num_rows == 16
    again = LayerTable(tmp_path, flush_s=0)
    again.append(rows(5))
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5] and read_layers(tmp_path).num_rows == 20


@pytest.mark.parametrize("merge_parts", [3, 100])
def test_a_resumed_run_replaces_the_course_that_was_given_up(
    merge_parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_table, "MERGE_PARTS", merge_parts)
    first = LayerTable(tmp_path, flush_s=0)
    for step in (10, 20, 30, 40):
        first.append(rows(step, value=1.0))
    second = LayerTable(tmp_path, flush_s=0)  # from a checkpoint at step 22, every 8 steps instead of 10
    for step in (24, 32):
        second.append(rows(step, value=2.0))
    read = read_layers(tmp_path)
    assert sorted({(r["step"], r["amax"]) for r in read.to_pylist()}) == [(10, 1.0), (20, 1.0), (24, 2.0), (32, 2.0)]


def test_a_damaged_part_does_not_hide_the_others(tmp_path: Path) -> None:
    table = LayerTable(tmp_path, flush_s=0)
    for step in (1, 2, 3):
        table.append(rows(step))
    (tmp_path / "part-00000001-00000001.parquet").write_bytes(b"")
    (tmp_path / ".part-00000009-00000009.parquet.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    assert steps_of(tmp_path) == [1, 3]


def test_a_refused_write_leaves_what_was_there(tmp_path: Path) -> None:
    table = LayerTable(tmp_path / "layers.parquet", flush_s=0)
    table.append(rows(1))
    (tmp_path / "layers.parquet" / ".part-00000001-00000001.parquet.tmp").mkdir()  # in the way of the next part
    with pytest.raises(OSError):
        table.append(rows(2))
    (tmp_path / "layers.parquet" / ".part-00000001-00000001.parquet.tmp").rmdir()
    table.append(rows(3))
    assert steps_of(tmp_path / "layers.parquet") == [1, 3]


def test_a_killed_writer_leaves_every_finished_part(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from fp8ctl.monitor.layer_table import *;"
        "t = LayerTable(Path(sys.argv[1]), flush_s=0);"
        "[t.append([LayerRow(s, 'a', 'input', 'fp8', 1, 0, 0, 30)]) for s in range(1, 8)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(fp8ctl.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env).returncode == -signal.SIGKILL
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
