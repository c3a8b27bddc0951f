from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8ctl.config.compose import compose
from fp8ctl.config.schema import TrainConfig
from fp8ctl.data.manifest import Manifest
from fp8ctl.engine.manifest import CheckpointManifest, digest
from fp8ctl.errors import ConfigError, DataError
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import write_status
from fp8ctl.worker.parent import Parent, check_hand_off, find_parent


def data_set(folder: Path, tokenizer: Path, **prepared: Any) -> Path:
    """A manifest without shards: all that is looked at."""
    from fp8ctl.data.tokenizer import load_tokenizer

    own = load_tokenizer(tokenizer)
    folder.mkdir(parents=True)
    Manifest(
        kind="sft", tokenizer_fingerprint=own.fingerprint, vocab_size=own.vocab_size, max_token_id=5, eos_id=0, splits={},
        counters={}, prepared={"tokenizer": str(tokenizer), "chat_template": "qwen3", **prepared}, fp8ctl_version="0",
    ).write(folder)  # fmt: skip
    return folder


def run_folder(folder: Path, tokenizer: Path, data: Path, stage: str = "sft", state: str = "finished") -> Path:
    """A run with one complete checkpoint, of step 4."""
    checkpoint = folder / "checkpoints" / "step-00000004"
    weights = checkpoint / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(b"weights")
    (weights / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    files = {f"weights/{f.name}": digest(f) for f in weights.iterdir()}
    CheckpointManifest(1, 1, "bf16", {}, {}, files).write(checkpoint)
    (folder / "config.yaml").write_text(yaml.safe_dump({"stage": stage, "data": {"path": str(data)}}))
    write_status(RunPaths(folder), state, step=4)  # type: ignore[arg-type]
    return folder


def settings(model: Path, data: Path, stage: str = "sft", **more: Any) -> TrainConfig:
    config = compose(f"train_{stage}", [f"data.path={data}", f"model.path={model}"])
    return config.model_copy(update=more)


@pytest.fixture
def data(tmp_path: Path, tokenizer_folder: Path) -> Path:
    return data_set(tmp_path / "data", tokenizer_folder)


@pytest.fixture
def run(tmp_path: Path, tokenizer_folder: Path, data: Path) -> Path:
    return run_folder(tmp_path / "run", tokenizer_folder, data)


def test_a_parent_is_its_run_step_and_hash(run: Path, data: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    weights = run / "checkpoints" / "step-00000004" / "weights"
    for path in (run, weights.parent, weights):
        parent = find_parent(settings(path, data))
        assert parent is not None and (parent.path, parent.stage, parent.step) == (str(run), "sft", 4)
        assert parent.hash is not None and parent.hash.startswith("xxh3:")
        assert check_hand_off(settings(weights, data)) == []
    other = run_folder(tmp_path / "other", tokenizer_folder, data)
    (other / "checkpoints/step-00000004/weights/model.safetensors").write_bytes(b"changed")
    files = {f"weights/{f.name}": digest(f) for f in (other / "checkpoints/step-00000004/weights").iterdir()}
    CheckpointManifest(1, 1, "bf16", {}, {}, files).write(other / "checkpoints/step-00000004")
    assert find_parent(settings(other, data)).hash != parent.hash  # type: ignore[union-attr]


def test_a_model_folder_is_a_parent_without_a_run(tmp_path: Path, data: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert find_parent(settings(tmp_path / "m", data)) == Parent(str((tmp_path / "m").resolve()))
    assert find_parent(compose("train_sft", ["model=tiny"])) is None
    assert check_hand_off(compose("train_sft", ["model=tiny"])) == []
    (warning,) = check_hand_off(settings(tmp_path / "m", data))
    assert "has no tokenizer.json: nothing says whether the data fits the model" in warning


def test_a_run_does_not_start_from_itself(run: Path, data: Path) -> None:
    weights = run / "checkpoints" / "step-00000004" / "weights"
    with pytest.raises(ConfigError, match="can't start from itself") as error:
        check_hand_off(settings(weights, data, run_dir=str(run)))
    assert "--resume" in (error.value.hint or "")


def test_unfinished_parents_and_stages_out_of_order(tmp_path: Path, tokenizer_folder: Path, data: Path) -> None:
    run = run_folder(tmp_path / "stopped", tokenizer_folder, data, state="preempted")
    weights = run / "checkpoints" / "step-00000004" / "weights"
    unfinished, order = check_hand_off(settings(weights, data, stage="cpt"))
    assert unfinished.endswith("is not finished (preempted at step 4)")
    assert order == f"continual pre-training starts from the fine-tuned weights of {run}"


def test_another_chat_template_than_the_stage_before(
    run: Path, tmp_path: Path, tokenizer_folder: Path, data: Path
) -> None:
    weights = run / "checkpoints" / "step-00000004" / "weights"
    other = data_set(tmp_path / "other", tokenizer_folder, chat_template="smollm2", system_prompt="s")
    (warning,) = check_hand_off(settings(weights, other))
    assert warning == (
        f"{other} renders conversations in another way than the data of {run}: "
        "chat_template qwen3 then, smollm2 now; system_prompt None then, s now"
    )
    (data / "manifest.json").unlink()
    (warning,) = check_hand_off(settings(weights, other))
    assert warning.startswith(f"the data of {run} can't be found any more")


def test_another_tokenizer_than_that_of_the_weights(run: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    weights = run / "checkpoints" / "step-00000004" / "weights"
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())

    def changed(name: str, value: dict[str, Any]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(value))
        return folder

    # only written in another way: the same tokens
    same = data_set(tmp_path / "same", changed("t1", content))
    assert check_hand_off(settings(weights, same)) == []
    added = {**content["added_tokens"][-1], "id": 512, "content": "<new>"}
    larger = changed("t2", {**content, "added_tokens": [*content["added_tokens"], added]})
    with pytest.raises(DataError, match=r"another tokenizer \(513 tokens\) than that of .* \(512 tokens\)"):
        check_hand_off(settings(weights, data_set(tmp_path / "larger", larger)))
    vocabulary = dict(content["model"]["vocab"])
    a, b = list(vocabulary)[100], list(vocabulary)[101]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    swapped = data_set(
        tmp_path / "swapped", changed("t3", {**content, "model": {**content["model"], "vocab": vocabulary}})
    )
    with pytest.raises(DataError, match="prepared with another tokenizer") as error:
        check_hand_off(settings(weights, swapped))
    assert error.value.hint == "prepare the data again with the tokenizer of the model"
    (tmp_path / "t3" / "tokenizer.json").unlink()
    (warning,) = check_hand_off(settings(weights, swapped))
    assert warning.endswith("which can't be found any more") and "is not the one that" in warning
