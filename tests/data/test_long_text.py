from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from fp8ctl.data import long_text
from fp8ctl.data.long_text import LongText
from fp8ctl.data.raw_text import RawText
from fp8ctl.data.rows import Document
from fp8ctl.data.stdlib_text import iter_stdlib

GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMES = ["gpt2", "gpt4", "llama2", "unigram", "wordpiece"]


@pytest.fixture(scope="module")
def prose() -> str:
    texts = []
    for row in iter_stdlib():
        if isinstance(row, Document) and row.origin.file > "stdlib/argparse":
            texts.append(row.text)
        if sum(map(len, texts)) > 600_000:
            break
    return "\n".join(texts)


@pytest.fixture(scope="module")
def cjk() -> str:
    letters = [chr(c) for c in range(0x4E00, 0x4F00)] + ["\uff0c", "\u3002"] * 6
    return "".join(random.Random(0).choices(letters, k=100_000))


@pytest.fixture(scope="module")
def tokenizers(prose: str, cjk: str) -> dict[str, Tokenizer]:
    """One of each kind: bytes with two ways of splitting, sentencepiece BPE without any splitting, Unigram, WordPiece."""
    corpus = [*prose[:200_000].splitlines(keepends=True), *(cjk[i : i + 50] for i in range(0, 10_000, 50))]
    bytes_ = pre_tokenizers.ByteLevel.alphabet()
    split = pre_tokenizers.Split(Regex(GPT4), "isolated")
    made = {
        "gpt2": (models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), None),
        "gpt4": (
            models.BPE(),
            pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
            None,
        ),
        "llama2": (models.BPE(unk_token="<unk>", byte_fallback=True), pre_tokenizers.Metaspace(), None),
        "unigram": (models.Unigram(), pre_tokenizers.Metaspace(), normalizers.NFKC()),
        "wordpiece": (
            models.WordPiece(unk_token="[UNK]"),
            pre_tokenizers.BertPreTokenizer(),
            normalizers.BertNormalizer(),
        ),
    }
    found = {}
    for name, (model, pre, normalizer) in made.items():
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre
        if normalizer is not None:
            backend.normalizer = normalizer
        options = {"vocab_size": 1500, "show_progress": False}
        if name == "unigram":
            trainer = trainers.UnigramTrainer(special_tokens=["<unk>", "</s>"], unk_token="<unk>", **options)
        elif name == "wordpiece":
            trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[CLS]"], **options)
        elif name == "llama2":
            fallback = [f"<0x{i:02X}>" for i in range(256)]
            trainer = trainers.BpeTrainer(special_tokens=["<unk>", "</s>", *fallback], **options)
        else:
            trainer = trainers.BpeTrainer(special_tokens=["<|end|>"], initial_alphabet=bytes_, **options)
        backend.train_from_iterator(corpus, trainer)
        if name == "llama2":  # as in its own file: the whole text is one word
            backend.pre_tokenizer = None
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        found[name] = backend
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that make many pieces of short texts."""
    for name, value in (("LONG_CHARS", 12_000), ("_WHOLE_CHARS", 30_000), ("_OVERLAP_CHARS", 4000)):
        monkeypatch.setattr(long_text, name, value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("small")
def test_pieces_give_the_ids_of_the_whole(name: str, tokenizers: dict[str, Tokenizer], prose: str, cjk: str) -> None:
    backend = tokenizers[name]
    encoder = LongText(backend, json.loads(backend.to_str()))
    chance = random.Random(1)
    texts = {
        "prose": prose[-150_000:],
        "cjk": cjk,
        "cjk in lines": "\n".join(cjk[i : i + 80] for i in range(0, len(cjk), 80)),
        "base64": base64.b64encode(chance.randbytes(60_000)).decode(),
        "spaces": " " * 80_000,
        "line ends": "\n" * 80_000,
        "one letter": "a" * 80_000,
        "white space": "".join(chance.choices([" ", "  ", "\n", "\t"], k=60_000)),
        "emoji": "".join(chance.choices("\U0001f600\U0001f44d\U0001f3fd\u00e9 ", k=60_000)),
    }
    for kind, text in texts.items():
        whole = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        assert encoder.encode(text).tolist() == whole, kind


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("small")
def test_prose_is_cut_between_words(name: str, tokenizers: dict[str, Tokenizer], prose: str) -> None:
    encoder = LongText(tokenizers[name], json.loads(tokenizers[name].to_str()))
    pieces = list(encoder._pieces(prose))
    assert max(map(len, pieces)) <= 12_000 + 1 and len(pieces) >= len(prose) // 12_000
    assert "".join(pieces).replace(" ", "") == prose.replace(" ", "")


@pytest.mark.usefixtures("small")
def test_tokens_across_spaces_are_never_cut(tokenizers: dict[str, Tokenizer], prose: str) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # merges whole phrases
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(prose[:200_000].splitlines(), trainer)
    encoder = LongText(backend, json.loads(backend.to_str()))
    text = prose[-100_000:]
    assert encoder.encode(text).tolist() == backend.encode_batch_fast([text])[0].ids


def test_control_tokens_and_short_texts_among_long_ones(tokenizer_folder: Path) -> None:
    encoder = RawText((tokenizer_folder / "tokenizer.json").read_bytes(), "text")
    long = "the quick <|im_end|> brown fox " * 40_000
    short, first, empty, second = encoder.encode(["a<think>", long, "", long + "x"])
    assert len(long) > long_text._WHOLE_CHARS and len(empty) == 0
    assert len(second) == len(first) + 1 and not {0, 1, 2} & set(np.unique(first).tolist())
    assert first.dtype == np.int32


@pytest.mark.usefixtures("small")
def test_one_unknown_word_and_no_place_to_go_on() -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    assert LongText(backend, json.loads(backend.to_str())).encode("b" * 40_000).tolist() == [0]
    # words of 1000 characters, wherever a piece begins: what stands in front moves them all
    backend.normalizer = normalizers.Prepend("\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(".{1000}"), "isolated")
    with pytest.raises(ValueError, match="a long text without any place where it can be encoded in pieces"):
        LongText(backend, json.loads(backend.to_str())).encode("b" * 40_000)
