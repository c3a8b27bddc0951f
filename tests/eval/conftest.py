from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fp8ctl.config.schema import EvalConfig, ModelShape, SuiteConfig
from fp8ctl.engine.manifest import CheckpointManifest
from fp8ctl.model.hf import save_hf
from fp8ctl.model.transformer import Transformer
from fp8ctl.paths import RunPaths, templates_dir

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHAPE = ModelShape(
    family="qwen2",
    num_layers=2,
    hidden_size=48,
    ffn_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_size=12,
    vocab_size=320,
    max_positions=512,
    init_std=0.3,  # wide enough that answers differ and some of them end by themselves
)
SUITE = SuiteConfig(families=("chain_sum", "lcm", "spell_backward"), num_questions=3, max_new_tokens=12)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Hugging Face folder: random weights, byte-level tokenizer, chat template, many end tokens."""
    source = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE.vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["answer the question: what is the final answer inside the answer tags?"] * 3, trainer)
    backend.save(str(source / "tokenizer.json"))
    template = (templates_dir() / "chat" / "smollm2.jinja").read_text()
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0], "chat_template": template}))
    # many tokens end an answer, or a random model would never stop
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(10, 40))}))

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    save_hf(Transformer(SHAPE).state_dict(), SHAPE, folder, tokenizer_from=source, dtype=torch.float32)
    return folder


@pytest.fixture
def config(model_folder: Path, tmp_path: Path) -> EvalConfig:
    """Nine greedy answers of the small model in FP32."""
    return EvalConfig(model=str(model_folder), out=str(tmp_path / "out"), suite=SUITE, dtype="fp32", device="cpu")


@pytest.fixture
def make_run(model_folder: Path) -> Callable[..., RunPaths]:
    """make_run(root, step, model=..., data=...): a run folder whose checkpoint holds the small model."""

    def make(root: Path, step: int = 10, *, model: Path | None = None, data: Path | None = None) -> RunPaths:
        paths = RunPaths(root)
        checkpoint = paths.checkpoint(step)
        shutil.copytree(model_folder, checkpoint / "weights")
        CheckpointManifest(1, 1, "bf16", {}, {}, {}).write(checkpoint)
        settings = {"model": {"path": str(model) if model else None}, "data": {"path": str(data) if data else None}}
        paths.config.write_text(json.dumps(settings))  # JSON is YAML
        return paths

    return make
