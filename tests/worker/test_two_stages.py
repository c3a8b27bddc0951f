"""Fine-tuning in two stages through the command line: stage 2 takes the weights of stage 1 and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8ctl.track.record import RunRecord

pytestmark = pytest.mark.slow
COMMON = [
    "model=tiny", "model.shape.vocab_size=512", "model.shape.hidden_size=64", "model.shape.ffn_size=192", "model.shape.head_size=16",
    "batch.seq_len_tokens=128", "batch.global_batch_rows=4", "track=jsonl", "engine.device=cpu", "optim.peak_lr=3e-3",
    "schedule.warmup_share=0.1", "loop.validation_rows=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(fp8ctl: Any, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The data sets of both stages."""
    folder = tmp_path_factory.mktemp("stages")
    made = []
    for stage in (1, 2):
        rows = [
            {
                "instruction": f"Count to {i % 7 + stage}",
                "input": "",
                "output": " ".join(map(str, range(1, i % 7 + stage + 1))),
            }
            for i in range(60)
        ]
        (folder / f"{stage}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        fp8ctl(
            "data", "prep", "source=sft_local", f"sources.0.paths=[{folder / f'{stage}.jsonl'}]", f"tokenizer={tokenizer_folder}",
            "chat_template=qwen2_5", "default_system=none", f"out={folder / f'data{stage}'}", "validation_share=0.1",
        )  # fmt: skip
        made.append(folder / f"data{stage}")
    return made


def test_two_stages(fp8ctl: Any, data: list[Path], tmp_path: Path, tokenizer_folder: Path) -> None:
    first, second = tmp_path / "stage1", tmp_path / "stage2"
    fp8ctl("train", "sft", *COMMON, f"data.path={data[0]}", "--run-dir", first, "loop.num_epochs=4")
    settings = yaml.safe_load((first / "config.yaml").read_text())
    assert settings["loop"]["num_epochs"] is None and settings["loop"]["num_steps"] > 4
    record = RunRecord(first)
    assert record.json(record.paths.env)["parent"] is None
    steps = [s["step"] for s in record.steps()]
    assert steps == list(range(1, settings["loop"]["num_steps"] + 1))

    # the weights of a model with random weights carry no tokenizer
    newest = max((first / "checkpoints").iterdir())
    (newest / "weights" / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    words = ["train", "sft", *COMMON, f"data.path={data[1]}", f"model.path={first}", "loop.num_epochs=2"]
    shown = fp8ctl(*words, "--dry-run").stdout
    for part in (
        "60 in, 60 kept",
        "samples        ",
        "a step on average",
        "2.",
        "cosine",
        f"sft run {first}",
        ">>>1 2",
    ):
        assert part.strip() in " ".join(shown.split()), part
    fp8ctl(*words, "--run-dir", second)
    parent = RunRecord(second).json(second / "env.json")["parent"]
    assert (parent["path"], parent["step"], parent["stage"]) == (str(first), steps[-1], "sft")
    assert parent["hash"].startswith("xxh3:")
    losses = [[s["loss"] for s in RunRecord(r).steps()] for r in (first, second)]
    assert losses[1][0] < losses[0][0] - 1.0, "stage 2 begins with what stage 1 learnt"
    rates = [s["lr"] for s in RunRecord(second).steps()]
    assert rates[0] < max(rates) or len(rates) < 10
    assert RunRecord(second).steps()[0]["step"] == 1

    sized = fp8ctl(
        *words[:-1], "loop.num_epochs=2", f"model.path={second}", "--run-dir", second, "--resume", code=2
    ).stderr
    assert "can't change when a run is resumed" in sized
