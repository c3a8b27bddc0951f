"""Every arm for real, on little text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8ctl.bench.data import measure_data
from fp8ctl.bench.data_show import data_bars, data_tables
from fp8ctl.bench.data_text import write_long_document, write_text
from fp8ctl.config.bench_schema import BenchDataConfig


def test_text_never_repeats_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    for i in range(3):
        (tmp_path / "lib" / f"{i}.py").write_text(f"print({i})\n" + "x = 1\n" * 700)
    (tmp_path / "lib" / "odd.py").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(
        "sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "lib"), "purelib": str(tmp_path / "lib")}
    )
    assert write_text(tmp_path / "t.jsonl", 30_000) == 8
    texts = [json.loads(line)["text"] for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len(set(texts)) == 8 and sum(map(len, texts)) >= 30_000
    write_long_document(tmp_path / "l.jsonl", 30_000)
    (line,) = (tmp_path / "l.jsonl").read_text().splitlines()
    assert len(json.loads(line)["text"]) >= 30_000


@pytest.mark.slow
def test_arms_count_the_same_tokens(tmp_path: Path, smollm2_folder: Path) -> None:
    pytest.importorskip("datatrove")
    config = BenchDataConfig(
        tokenizer=str(smollm2_folder),
        workers=(1,),
        text_mb=1,
        rounds=1,
        memory_mb=(1,),
        long_document_mb=1,
        packing_samples=(1000,),
        scratch=str(tmp_path),
    )
    seen: list[tuple[int, int, str]] = []
    rows = measure_data(config, lambda done, total, what: seen.append((done, total, what)))["rows"]
    speed = {r["key"]: r for r in rows if r["table"] == "speed"}
    assert set(speed) == {"bare", "fp8ctl", "datatrove", "megatron"}
    assert not [r for r in speed.values() if "skipped" in r]
    assert speed["bare"]["tokens"] == speed["fp8ctl"]["tokens"] == speed["megatron"]["tokens"]
    # it takes control tokens that are written in text for control tokens
    assert speed["datatrove"]["tokens"] == pytest.approx(speed["bare"]["tokens"], rel=1e-3)
    assert [r["input"] for r in rows if r["table"] == "memory"] == ["1 MiB", "one document of 1 MiB"]
    assert [done for done, _, _ in seen] == list(range(seen[0][1]))
    assert len(data_tables(rows)) == 3
    assert list(tmp_path.iterdir()) == []


def row(key: str, processes: int, rate: float) -> dict[str, Any]:
    return {"table": "speed", "key": key, "processes": processes, "tokens_per_second_per_core": rate}


def test_bars() -> None:
    rows = [
        row("bare", 1, 100.0),
        row("fp8ctl", 1, 96.0),
        row("fp8ctl", 2, 90.0),
        row("datatrove", 1, 60.0),
        row("datatrove", 2, 50.0),
        {"table": "speed", "key": "megatron", "processes": 1, "skipped": "not installed"},
        {"table": "memory", "input": "512 MiB", "peak_gib_per_process": 0.5},
        {"table": "memory", "input": "2,048 MiB", "peak_gib_per_process": 0.6},
        {"table": "memory", "input": "one document of 100 MiB", "peak_gib_per_process": 1.6},
        {"table": "packing", "samples": 1_000_000, "fill": 0.999, "seconds": 2.0},
    ]
    bars = {bar.name: (round(bar.value, 4), bar.holds) for bar in data_bars(rows, "busy")}
    assert bars == {
        "tokens/s per core, 1 process, to encode_batch_fast alone": (0.96, True),
        "tokens/s per core, 1 process, to datatrove": (1.6, True),
        "tokens/s per core, 2 processes, to encode_batch_fast alone": (0.9, False),
        "tokens/s per core, 2 processes, to datatrove": (1.8, True),
        "peak memory per process, 512 MiB": (0.5, True),
        "peak memory per process, 2,048 MiB": (0.6, True),
        "peak memory per process, one document of 100 MiB": (1.6, False),
        "peak memory, largest to smallest input": (1.2, False),
        "packing of 1,000,000 samples, fill": (0.999, True),
        "packing of 1,000,000 samples": (2.0, True),
    }
