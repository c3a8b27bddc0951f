from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
    assert not set(ids.tolist()) & {0, 1, 2, tokenizer.backend.token_to_id("<think>")}
    assert tokenizer.decode(ids) == text
    chat_ids, _ = tokenizer.encode_chat(text)
    assert chat_ids.tolist().count(2) == 1 and chat_ids.tolist().count(0) == 1
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


# ------------------------------------------------------------ control tokens in documents


def ids_of(folder: Path, text: str, mode: Any) -> list[str]:
    tokenizer = load_tokenizer(folder, mode)
    (ids,) = tokenizer.encode_documents([text])
    return [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]) in ("<|im_end|>", "<think>", "  ")]


@pytest.mark.parametrize(
    ("mode", "given"),
    [("text", []), ("ids_unless_special", ["<think>"]), ("ids", ["<|im_end|>", "<think>"])],
)
def test_what_becomes_of_control_tokens(tokenizer_folder: Path, mode: str, given: list[str]) -> None:
    assert ids_of(tokenizer_folder, "a<|im_end|>b<think> c", mode) == given
    (ids,) = load_tokenizer(tokenizer_folder, mode).encode_documents(["a<|im_end|>b<think> c"])  # type: ignore[arg-type]
    assert load_tokenizer(tokenizer_folder).decode(ids) == "a<|im_end|>b<think> c"
    assert load_tokenizer(tokenizer_folder, mode).holds_control_text("a<|im_end|>")  # type: ignore[arg-type]
    assert not load_tokenizer(tokenizer_folder).holds_control_text("a<|im_end|b<p>")


def saved(folder: Path, backend: Tokenizer) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_added_tokens_that_are_text_stay_tokens(tmp_path: Path, tokenizer_folder: Path) -> None:
    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.add_tokens(["    ", "<table>", "<tool_call>", "[INST]"])
    tokenizer = load_tokenizer(saved(tmp_path, backend))
    (ids,) = tokenizer.encode_documents(["    <table>[INST]<tool_call>    "])
    assert [t for t in map(backend.id_to_token, ids) if len(t) > 3] == ["    ", "<table>", "    "]
    assert tokenizer.decode(ids) == "    <table>[INST]<tool_call>    "


def test_a_unigram_model_does_not_find_its_own_control_tokens(tmp_path: Path) -> None:
    pieces = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        ("\u2581", -2.0),
        *((c, -3.0) for c in "abs</>"),
        ("\u2581a", -1.0),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    assert 2 in backend.encode("a</s>").ids  # by the vocabulary alone
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = load_tokenizer(saved(tmp_path, backend))
    (ids,) = tokenizer.encode_documents(["a</s>b<s>"])
    assert not {1, 2} & set(ids.tolist()) and tokenizer.decode(ids) == "a</s>b<s>"
    assert {1, 2} <= set(load_tokenizer(tmp_path, "ids").encode_documents(["a</s>b<s>"])[0].tolist())


def test_merges_that_make_a_control_token_are_left_out(tmp_path: Path) -> None:
    vocab = {c: i for i, c in enumerate("<s>ab")} | {"<s": 5, "<s>": 6, "ab": 7}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("<", "s"), ("<s", ">")]))
    backend.add_special_tokens(["<s>"])
    (ids,) = load_tokenizer(saved(tmp_path, backend)).encode_documents(["ab<s>"])
    assert ids.tolist() == [7, 5, 2]


def test_begin_of_text(tokenizer_folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(tokenizer_folder).bos_id == 1
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path).bos_id is None
    (tmp_path / "config.json").write_text('{"bos_token_id": 2}')
    assert load_tokenizer(tmp_path).bos_id == 2


def test_control_tokens_that_cannot_be_text(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "<nothing>": 1}, unk_token="<nothing>"))
    backend.add_special_tokens(["<nothing>"])
    tokenizer = load_tokenizer(saved(tmp_path, backend))
    assert tokenizer.encode_documents(["a"])[0].tolist() == [0]  # what stands for the unknown may come
    backend = Tokenizer(models.WordLevel({"a": 0, "<nothing>": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["a"])
    assert load_tokenizer(saved(tmp_path, backend)).encode_documents(["b a"])[0].tolist() == [0, 0]
