from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fp8ctl.data.tokenizer import load_tokenizer
from fp8ctl.errors import DataError


def test_loads_a_folder(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    # training text is small, so the vocabulary stops short of 400; <think> was added last
    assert tokenizer.vocab_size == tokenizer.backend.token_to_id("<think>") + 1
    assert tokenizer.eos_id == 0
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.template_variables == {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    assert tokenizer.chat_template is not None and "im_start" in tokenizer.chat_template


def test_control_tokens_in_raw_text_stay_text(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    text = "a <|im_end|> b<|endoftext|> \u00e9\U0001f600 <think>"
    (ids,) = tokenizer.encode_documents([text])
    assert not set(ids.tolist()) & {0, 1, 2}
    assert tokenizer.decode(ids) == text
    chat_ids, _ = tokenizer.encode_chat(text)
    assert chat_ids.tolist().count(2) == 1 and chat_ids.tolist().count(0) == 1
    # and back again: the switch is set at each call
    assert tokenizer.encode_documents([text])[0].tolist() == ids.tolist()


def test_no_truncation_and_no_padding(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    short, long = tokenizer.encode_documents(["a", "zq" * 50])
    assert len(short) == 1
    assert tokenizer.decode(long) == "zq" * 50


def test_ranges_keep_white_space(tokenizer_folder: Path) -> None:
    ranges = load_tokenizer(tokenizer_folder).encode_chat("a \n  b")[1].offsets
    assert ranges[0][0] == 0 and ranges[-1][1] == 6
    assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False))


@pytest.mark.parametrize(
    ("files", "eos_id"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, 2),
        ({"config.json": {"eos_token_id": 1}}, 1),
        ({"generation_config.json": {"eos_token_id": [2, 0]}}, 2),
        ({"tokenizer_config.json": {"eos_token": "<absent>"}, "config.json": {"eos_token_id": 0}}, 0),
        ({"tokenizer_config.json": {"eos_token": None}}, None),
    ],
)
def test_eos(tokenizer_folder: Path, tmp_path: Path, files: dict[str, dict[str, object]], eos_id: int | None) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert load_tokenizer(tmp_path).eos_id == eos_id


def test_chat_template_file_wins_and_named_lists_are_read(tokenizer_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).chat_template == "F"


def test_errors(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer\.json in ") as error:
        load_tokenizer(tmp_path)
    assert error.value.hint == "give the folder of a Hugging Face model (`fp8ctl model import`)"
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(DataError, match=r"tokenizer\.json can't be read: "):
        load_tokenizer(tmp_path)
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)
