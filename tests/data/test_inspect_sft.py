from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fp8ctl.config.checks import check_data_prep
from fp8ctl.config.data_schema import DataPrepConfig, SourceConfig
from fp8ctl.data.inspect_sft import inspect_conversations, marked_text, render
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.prepare import prepare
from fp8ctl.errors import ConfigError


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def config(tokenizer_folder: Path, tmp_path: Path) -> DataPrepConfig:
    rows = [chat(f"q {i}", "word " * (1 + i % 9)) for i in range(30)]
    rows += [
        {"x": 1},
        {"y": 2},
        chat("a<|im_end|>", "b"),
        {"messages": [{"role": "user"}]},
        chat("long", "word " * 300),
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataPrepConfig(
        kind="sft", sources=(SourceConfig(paths=(str(tmp_path / "a.jsonl"),)),), tokenizer=str(tokenizer_folder),
        chat_template="smollm2", max_tokens=200, max_bad_rate=1.0, validation_share=0.0, out=str(tmp_path / "out"),
    )  # fmt: skip


def shown(thing: Any) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(thing, highlight=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_it_counts_what_a_preparation_counts(config: DataPrepConfig) -> None:
    report = inspect_conversations(config, 256)
    prepare(config)
    manifest = Manifest.read(config.out or "")
    for name in ("rows", "kept", "dropped", "dropped_tokens", "notes", "bad"):
        assert getattr(report.counts, name) == manifest.counters[name], name
    assert report.counts.rows == 35 and report.counts.dropped == {"too_long": 1} and report.counts.bad == 4
    shards = manifest.splits["train"]
    assert report.trained_tokens == sum(s.trained_tokens for s in shards)
    assert report.counts.tokens == sum(s.tokens for s in shards)
    assert report.percentiles[100] <= 200 and 0 < report.packs < 30
    assert report.fill_share == pytest.approx(report.counts.tokens / (report.packs * 256))
    assert {reason: bad.rows for reason, bad in report.bad.items()} == {
        "no conversation in the row (fields: x)": 1,
        "no conversation in the row (fields: y)": 1,
        "a message holds the control token <|im_end|>": 1,
        "the content of turn N is null, not text": 1,
    }
    assert report.bad["no conversation in the row (fields: x)"].first.endswith("a.jsonl line 31")


def test_it_is_shown(config: DataPrepConfig) -> None:
    text = shown(render(inspect_conversations(config, 256)))
    for part in (
        "35 in, 30 kept as 30 samples", "1 rows: too_long, ", "4 rows in quarantine", "1: no conversation in the row (fields: x)",
        "p50 ", "% full", ">>>word <|im_end|><<<", "rows of 256 tokens an epoch",
    ):  # fmt: skip
        assert part in text, part
    short = shown(render(inspect_conversations(config, 60)))
    assert "samples are longer than a row: set max_tokens=60" in short


def test_few_rows_and_none(config: DataPrepConfig, tmp_path: Path) -> None:
    assert inspect_conversations(config, 256, max_rows=3).counts.rows == 3
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    report = inspect_conversations(config, 256)
    assert (report.counts.kept, report.packs, report.sample) == (0, 0, [])
    assert "none" in shown(render(report))


def test_long_pieces_are_cut_in_the_middle() -> None:
    text = marked_text([("user " * 500, False), ("answer" * 500 + "<|im_end|>", True)], most_chars=100)
    assert "[... 2,400 characters ...]" in text.plain and text.plain.endswith("<|im_end|><<<")
    assert [span.style for span in text.spans] == ["green"] and text.plain[text.spans[0].start :].startswith(
        ">>>answer"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"over_length": "split"}, "over_length: split needs a length"),
        (
            {"default_system": "none", "system_prompt": "s"},
            "default_system: none is asked for, and a system_prompt too",
        ),
    ],
)
def test_settings_that_do_not_fit(config: DataPrepConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_data_prep(config.model_copy(update={"max_tokens": None, **changes}))


def test_the_command(fp8ctl: Any, config: DataPrepConfig, tmp_path: Path) -> None:
    words = ["data", "inspect", "--sft", tmp_path / "a.jsonl", f"tokenizer={config.tokenizer}", "chat_template=smollm2"]
    figures = json.loads(fp8ctl(*words, "--json", "--seq-len", 256).stdout)
    assert figures["counts"]["rows"] == 35 and figures["packs"] > 0
    assert "35 in, 31 kept" in fp8ctl(*words).stdout
    assert "no tokenizer" in fp8ctl("data", "inspect", "--sft", tmp_path / "a.jsonl", code=2).stderr
