from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from fp8ctl.config.schema import ModelShape
from fp8ctl.model.transformer import Transformer

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HF_CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-rope-scaled": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3-tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


@pytest.fixture(params=sorted(HF_CONFIGS))
def kind(request: pytest.FixtureRequest) -> str:
    """Runs a test for each family, tied and untied."""
    return request.param


@pytest.fixture
def hf_model() -> Callable[[str], transformers.PreTrainedModel]:
    """Builds a small random model of transformers; biases and norms are random too, so that leaving one out is seen."""

    def build(kind: str) -> transformers.PreTrainedModel:
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(HF_CONFIGS[kind](), dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        return model

    return build


@pytest.fixture
def hf_folder(hf_model: Callable, tmp_path: Path) -> Callable[[str], Path]:
    """Writes the model folder of a kind, as transformers itself writes it."""

    def write(kind: str) -> Path:
        hf_model(kind).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return write


@pytest.fixture
def gpu() -> None:
    """Skips a test where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture
def shape() -> ModelShape:
    return ModelShape(
        family="llama",
        num_layers=2,
        hidden_size=32,
        ffn_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        vocab_size=61,
        max_positions=256,
        init_std=0.2,
    )


@pytest.fixture
def model(shape: ModelShape) -> Transformer:
    torch.manual_seed(3)
    return Transformer(shape)


@pytest.fixture
def pack() -> Callable[..., Packed]:
    """Puts documents into a packed row: token ids, positions, cu_seqlens and the longest document's length."""

    def packed(*documents: torch.Tensor) -> Packed:
        lengths = torch.tensor([0] + [len(d) for d in documents])
        positions = torch.cat([torch.arange(len(d)) for d in documents])
        return torch.cat(documents), positions, lengths.cumsum(0).to(torch.int32), int(lengths.max())

    return packed
