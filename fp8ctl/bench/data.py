"""`fp8ctl bench data`: tokens per second and core, memory, and packing, beside other people's tools on the same text."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fp8ctl.bench.data_text import write_long_document, write_text
from fp8ctl.config.bench_schema import BenchDataConfig
from fp8ctl.data.packing import best_fit_decreasing
from fp8ctl.errors import DataError

TITLES = {
    "bare": "encode_batch_fast alone",
    "fp8ctl": "fp8ctl data prep",
    "datatrove": "datatrove",
    "megatron": "Megatron's way",
}
_MEAN_LOG, _SIGMA_LOG = np.log(7600), 0.75
"""Lognormal lengths with a mean of about 9,800 tokens when cut at 32,768, as long reasoning answers have."""


def measure_data(config: BenchDataConfig, report: Callable[[int, int, str], None]) -> dict[str, Any]:
    """Runs everything; rows are flat, apart by `table`: speed, memory, packing.

    Raises:
        DataError: this project's own arm fails.
    """
    assert config.tokenizer is not None, "the command asks for it"
    arms = [(arm, workers) for arm in config.arms for workers in config.workers if arm != "bare" or workers == 1]
    arms = [(arm, workers) for arm, workers in arms if arm != "megatron" or workers == 1]
    total = (
        len(arms) * config.rounds + len(config.memory_mb) + (config.long_document_mb > 0) + len(config.packing_samples)
    )
    done = 0

    def told(what: str) -> None:
        nonlocal done
        report(done, total, what)
        done += 1

    with tempfile.TemporaryDirectory(prefix="fp8ctl-bench-", dir=config.scratch) as folder:
        scratch = Path(folder)
        text = scratch / "text.jsonl"
        documents = write_text(text, config.text_mb * 2**20)
        seen: dict[tuple[str, int], list[dict[str, Any]]] = {arm: [] for arm in arms}
        for turn in range(config.rounds):
            for arm, workers in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
                told(f"{TITLES[arm]}, {workers} processes, round {turn + 1}")
                seen[arm, workers].append(_run(arm, text, config.tokenizer, scratch / "out", workers))
        speed = [_speed_row(arm, workers, runs, config, documents) for (arm, workers), runs in seen.items()]
        memory = []
        for size in config.memory_mb:
            told(f"memory, {size:,} MiB of text")
            write_text(scratch / "memory.jsonl", size * 2**20)
            memory.append(_memory_row(scratch, config, f"{size:,} MiB"))
        if config.long_document_mb:
            told("memory, one long document")
            write_long_document(scratch / "memory.jsonl", config.long_document_mb * 2**20)
            memory.append(_memory_row(scratch, config, f"one document of {config.long_document_mb:,} MiB"))
    packing = []
    for num in config.packing_samples:
        told(f"packing of {num:,} samples")
        packing.append(_packing_row(num))
    return {"rows": [*speed, *memory, *packing]}


def _run(arm: str, text: Path, tokenizer: str, out: Path, workers: int) -> dict[str, Any]:
    """What the process of one arm printed, or {"error": why it did not}."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "fp8ctl.bench.data_arms", arm, str(text), tokenizer, str(out), str(workers)]
    one_core = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env={**os.environ, **one_core, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(out, ignore_errors=True)
    if done.returncode == 0:
        return json.loads(done.stdout.strip().split("\n")[-1])
    last = (done.stderr.strip().split("\n") or ["no message"])[-1]
    if arm == "fp8ctl":
        raise DataError(f"the arm fp8ctl failed: {last}", "run `fp8ctl data prep` on the text to see more")
    return {"error": last}


def _speed_row(
    arm: str, workers: int, runs: list[dict[str, Any]], config: BenchDataConfig, documents: int
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "table": "speed",
        "arm": TITLES[arm],
        "key": arm,
        "processes": workers,
        "text_mib": config.text_mb,
        "documents": documents,
    }
    errors = [run["error"] for run in runs if "error" in run]
    if errors:
        return {**row, "skipped": errors[0]}
    rates = [run["tokens"] / run["seconds"] / workers for run in runs]
    quartiles = statistics.quantiles(rates, n=4) if len(rates) > 1 else [rates[0]] * 3
    return {
        **row,
        "tokens": runs[0]["tokens"],
        "seconds": statistics.median(run["seconds"] for run in runs),
        "tokens_per_second_per_core": statistics.median(rates),
        "half_quartile_distance": (quartiles[2] - quartiles[0]) / 2,
        "peak_gib": max(run["peak_bytes"] for run in runs) / 2**30,
        "rates": [round(rate) for rate in rates],
    }


def _memory_row(scratch: Path, config: BenchDataConfig, name: str) -> dict[str, Any]:
    assert config.tokenizer is not None
    text = scratch / "memory.jsonl"
    size = text.stat().st_size
    workers = max(config.workers)
    run = _run("fp8ctl", text, config.tokenizer, scratch / "out", workers)
    text.unlink()
    return {
        "table": "memory",
        "input": name,
        "file_mib": size / 2**20,
        "processes": workers,
        "tokens": run["tokens"],
        "seconds": run["seconds"],
        "peak_gib_per_process": run["peak_bytes"] / 2**30,
    }


def _packing_row(num: int) -> dict[str, Any]:
    capacity = 32_768
    draw = np.random.default_rng(0).lognormal(_MEAN_LOG, _SIGMA_LOG, num)
    lengths = np.sort(np.clip(draw, 50, capacity).astype(np.int64))[::-1]
    start = time.perf_counter()
    packs = int(best_fit_decreasing(lengths, capacity).max()) + 1
    seconds = time.perf_counter() - start
    return {
        "table": "packing",
        "samples": num,
        "mean_length": float(lengths.mean()),
        "row_tokens": capacity,
        "packs": packs,
        "fill": float(lengths.sum() / (packs * capacity)),
        "seconds": seconds,
    }
