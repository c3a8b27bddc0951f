"""The store of answers: kill and continue, order, and refusal to mix settings."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from fp8ctl.errors import CheckpointError, ConfigError, DataError
from fp8ctl.eval import completions as module
from fp8ctl.eval.completions import Completion, CompletionStore, Key, differences, hash_settings

SETTINGS = {"suite": {"seed": 1, "temperature": 0.0}, "model": "xxh3:0"}


def answer(index: int, text: str = "<answer>4</answer>", sample: int = 0) -> Completion:
    return Completion(
        family="gcd",
        index=index,
        sample=sample,
        question="q",
        expected="4",
        text=text,
        answer="4",
        score=1.0,
        finish_reason="stop",
        prompt_tokens=9,
        answer_tokens=5,
    )


def test_answers_survive_and_keep_their_text(tmp_path: Path) -> None:
    odd = ["nan", "inf", "", "line\nbreak\u2028\x85", "\u00e4 \U0001f600 <|im_end|>"]
    with CompletionStore(tmp_path, SETTINGS) as store:
        for i, text in enumerate(odd):
            store.add(answer(i, text))
    with CompletionStore(tmp_path, SETTINGS) as store:
        assert [store.completions[Key("gcd", i, 0)].text for i in range(len(odd))] == odd


def test_killed_writer_loses_only_the_line_it_was_writing(tmp_path: Path) -> None:
    with CompletionStore(tmp_path, SETTINGS) as store:
        store.add(answer(0))
        store.add(answer(1))
    path = tmp_path / "completions.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with CompletionStore(tmp_path, SETTINGS) as store:
        assert list(store.completions) == [Key("gcd", 0, 0)]
        store.add(answer(1))
    with CompletionStore(tmp_path, SETTINGS) as store:
        assert len(store.completions) == 2


def test_whole_files_are_equal_whatever_the_order_of_finishing(tmp_path: Path) -> None:
    keys = [Key("gcd", 0, 0), Key("gcd", 0, 1), Key("gcd", 1, 0)]
    for name, order in [("a", keys), ("b", keys[::-1])]:
        with CompletionStore(tmp_path / name, SETTINGS) as store:
            for key in order:
                store.add(answer(key.index, sample=key.sample))
            assert [c.key for c in store.close_with(keys)] == keys
    assert (tmp_path / "a/completions.jsonl").read_bytes() == (tmp_path / "b/completions.jsonl").read_bytes()


def test_received_must_equal_requested(tmp_path: Path) -> None:
    with CompletionStore(tmp_path, SETTINGS) as store:
        store.add(answer(0))
        with pytest.raises(AssertionError, match="1 answers missing, 0 not asked for"):
            store.close_with([Key("gcd", 0, 0), Key("gcd", 1, 0)])
        with pytest.raises(AssertionError):
            store.add(answer(0))


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with CompletionStore(tmp_path, SETTINGS) as store:
        store.add(answer(0))
    other = {**SETTINGS, "suite": {"seed": 1, "temperature": 0.6}}
    with pytest.raises(ConfigError, match=r"other settings: suite\.temperature is 0\.0 there, 0\.6 now") as caught:
        CompletionStore(tmp_path, other).__enter__()
    assert "name=NAME" in (caught.value.hint or "")
    with CompletionStore(tmp_path, SETTINGS) as store:  # the refusal let go of the lock
        assert len(store.completions) == 1


def test_answers_of_unknown_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "completions.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="answers of unknown settings"):
        CompletionStore(tmp_path, SETTINGS).__enter__()


def test_second_writer_is_refused(tmp_path: Path) -> None:
    with (
        CompletionStore(tmp_path, SETTINGS),
        pytest.raises(ConfigError, match="another evaluation is writing") as caught,
    ):
        CompletionStore(tmp_path, SETTINGS).__enter__()
    assert "wait for it" in (caught.value.hint or "")


@pytest.mark.parametrize("line", ["[1", json.dumps({"family": "gcd"})])
def test_damaged_file_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    with CompletionStore(tmp_path, SETTINGS) as store:
        store.add(answer(0))
    with open(tmp_path / "completions.jsonl", "a") as f:
        f.write(line + "\n")
    with pytest.raises(DataError, match="line 2 is no answer of this version"):
        CompletionStore(tmp_path, SETTINGS).__enter__()


def test_hash_ignores_key_order_only() -> None:
    assert hash_settings({"a": 1, "b": [1, 2]}) == hash_settings({"b": [1, 2], "a": 1})
    assert hash_settings({"a": 1, "b": [1, 2]}) != hash_settings({"a": 1, "b": [2, 1]})


def test_differences_name_added_and_removed_keys() -> None:
    assert differences({"a": 1}, {"b": {"c": 2}}) == ["a is 1 there, null now", 'b is null there, {"c": 2} now']


def test_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        with open(path, "a") as f:
            f.write('{"family": "gc')
        raise OSError(errno.ENOSPC, "No space left on device")

    with CompletionStore(tmp_path, SETTINGS) as store:
        store.add(answer(0))
        monkeypatch.setattr(module, "append_jsonl", full)
        with pytest.raises(CheckpointError, match="can't be written to .*: No space left on device") as caught:
            store.add(answer(1))
    assert "goes on from the answers that are there" in (caught.value.hint or "")
    monkeypatch.undo()
    with CompletionStore(tmp_path, SETTINGS) as store:
        store.add(answer(1))
        assert len(store.close_with([Key("gcd", 0, 0), Key("gcd", 1, 0)])) == 2


def test_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="answers can't be written to .*: (Not a directory|File exists)"):
        CompletionStore(tmp_path / "file" / "out", SETTINGS).__enter__()
