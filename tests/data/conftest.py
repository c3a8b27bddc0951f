from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "the quick brown fox jumps over the lazy dog and the assistant answers the user",
    "def add(a, b):\n    return a + b\n\n\nclass Thing:\n    pass\n",
    "system user assistant question answer one two three four five six seven eight nine ten",
]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with three control tokens (0, 1, 2), `<think>` (which is none) and a ChatML template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    # left over from somebody's last use of the file: must not reach our data
    backend.enable_truncation(5)
    backend.enable_padding(length=5)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}, "bos_token": "<|im_start|>", "chat_template": CHATML})
    )
    return folder


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def closed_folder() -> Iterator[Path]:
    """A folder that everybody may look into, for tests of permissions; root, who may read everything, is somebody else meanwhile."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        for path in folder.iterdir():
            path.chmod(0o700)
        shutil.rmtree(folder)
