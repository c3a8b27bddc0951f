"""Following a model back to its data sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from fp8ctl.config.schema import SuiteConfig
from fp8ctl.data.manifest import Manifest
from fp8ctl.errors import ConfigError
from fp8ctl.eval.lineage import read_training_data
from fp8ctl.paths import RunPaths

SUITE = SuiteConfig(families=("chain_sum", "lcm"), seed=7)
MakeRun = Callable[..., RunPaths]


def make_data(
    folder: Path, source: dict[str, Any], stage: Literal["cpt", "sft"] = "sft", template: str | None = None
) -> Path:
    folder.mkdir()
    Manifest(
        kind=stage,
        tokenizer_fingerprint="0",
        vocab_size=10,
        max_token_id=9,
        eos_id=0,
        splits={},
        counters={},
        prepared={"sources": [source], "chat_template": template, "default_system": "none" if template else "keep"},
        fp8ctl_version="0",
    ).write(folder)
    return folder


def test_line_goes_back_over_runs(make_run: MakeRun, tmp_path: Path) -> None:
    text = make_data(tmp_path / "text", {"kind": "python_stdlib"}, "cpt")
    chats = make_data(tmp_path / "chats", {"kind": "reasoning_gym", "seed": 8}, template="qwen3")
    cpt = make_run(tmp_path / "cpt", data=text)
    sft = make_run(tmp_path / "sft", model=cpt.checkpoint(10) / "weights", data=chats)
    found = read_training_data(SUITE, sft.root)
    assert (found.checked, found.unknown, found.chat_template) == ((str(chats), str(text)), (), "qwen3")
    assert found.default_system == "none"
    before = read_training_data(SUITE, cpt.root)
    assert (before.chat_template, before.default_system) == (None, "keep")


@pytest.mark.parametrize("families", [[], ["lcm", "products"]])
def test_seed_of_the_training_questions_is_refused(make_run: MakeRun, tmp_path: Path, families: list[str]) -> None:
    data = make_data(tmp_path / "data", {"kind": "reasoning_gym", "seed": 7, "families": families})
    with pytest.raises(ConfigError, match="the model was trained on questions of seed 7") as caught:
        read_training_data(SUITE, make_run(tmp_path / "run", data=data).root)
    assert "lcm" in caught.value.message and caught.value.hint == "set suite.seed to another number"


def test_other_families_and_other_sources_may_have_the_seed(make_run: MakeRun, tmp_path: Path) -> None:
    for name, source in {"a": {"kind": "reasoning_gym", "families": ["products"]}, "b": {"kind": "jsonl"}}.items():
        data = make_data(tmp_path / f"data-{name}", {"seed": 7, **source})
        assert read_training_data(SUITE, make_run(tmp_path / name, data=data).root).checked == (str(data),)


def test_gaps_are_told(make_run: MakeRun, tmp_path: Path) -> None:
    assert "nothing says what the model was trained on" in read_training_data(SUITE, None).unknown[0]
    gone = make_run(tmp_path / "gone", model=tmp_path / "absent", data=tmp_path / "moved")
    weights, data = read_training_data(SUITE, gone.root).unknown
    assert "started from weights that can't be found" in weights and "no data set in" in data
    (nameless,) = read_training_data(SUITE, make_run(tmp_path / "nameless").root).unknown
    assert nameless.endswith("its config.yaml names no data set")
