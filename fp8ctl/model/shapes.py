"""Sizes of a model without its weights: Hugging Face's config.json in and out, parameters, linears and FLOPs. No torch.

What a config asks for and this model lacks is refused here, so that no weight is ever loaded into the wrong formula.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from fp8ctl.config.schema import ModelShape, RopeScaling
from fp8ctl.errors import ModelError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


def shape_from_hf_config(config: dict[str, Any]) -> ModelShape:
    """Reads the shape out of the content of a Hugging Face config.json (as transformers 4 or 5 write it).

    Raises:
        ModelError: another architecture, missing keys, or features that would change the formula; all are named at
        once.
    """
    family = config.get("model_type")
    if family not in _ARCHITECTURES:
        raise ModelError(f"model type {family!r} is not supported", f"supported: {', '.join(_ARCHITECTURES)}")
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}", "use the config.json that came with the weights")
    problems = _unsupported(config)
    if problems:
        raise ModelError(
            f"config.json asks for what this model lacks: {'; '.join(problems)}", "only plain dense models can be read"
        )

    try:
        shape = _shape(config)
    except ValidationError as e:
        fields = ", ".join(str(problem["loc"][-1]) for problem in e.errors())
        raise ModelError(
            f"config.json holds values that fit no model: {fields}", "use the config.json that came with the weights"
        ) from None
    check_shape(shape)
    return shape


def _shape(config: dict[str, Any]) -> ModelShape:
    num_heads, head_size = config["num_attention_heads"], config.get("head_dim")
    if not head_size:
        # Qwen3 has 128 whatever the hidden size; the others derive it
        head_size = 128 if config["model_type"] == "qwen3" else config["hidden_size"] // num_heads
    rope_base, rope_scaling = _rope(config)
    return ModelShape(
        family=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_size=head_size,
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rope_base=rope_base,
        rope_scaling=rope_scaling,
        rms_norm_eps=config["rms_norm_eps"],
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        init_std=config.get("initializer_range") or 0.02,
    )


def check_shape(shape: ModelShape) -> None:
    """Refuses sizes that don't fit together.

    Raises:
        ModelError: query heads no multiple of key/value heads, or heads of odd size (RoPE turns pairs).
    """
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(
            f"{shape.num_heads} query heads can't share {shape.num_kv_heads} key/value heads evenly",
            "num_kv_heads must divide num_heads",
        )
    if shape.head_size % 2:
        raise ModelError(
            f"head size {shape.head_size} is odd", "rotary embeddings turn pairs of values: use an even head_size"
        )


def _unsupported(config: dict[str, Any]) -> list[str]:
    found = []
    if config.get("quantization_config"):
        found.append("quantized weights (quantization_config)")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act {config['hidden_act']!r}")
    if config.get("attention_dropout"):
        found.append(f"attention_dropout {config['attention_dropout']}")
    # Qwen2 has its bias on q, k and v without saying so
    found += [key for key in ("attention_bias", "mlp_bias") if config.get(key) and config["model_type"] != "qwen2"]
    windows = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    if windows:
        found.append("sliding-window attention")
    rope = _rope_settings(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        found.append(f"rope type {kind!r}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        found.append("rotary embeddings on a part of the head (partial_rotary_factor)")
    return found


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters, transformers 4 rope_scaling beside rope_theta
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = _rope_settings(config)
    base = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return base, None
    return base, RopeScaling(
        factor=rope.get("factor"),
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
        original_max_positions=rope.get("original_max_position_embeddings") or config["max_position_embeddings"],
    )


def hf_config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """Content of config.json for `shape`; `dtype` is Hugging Face's name of the weights' type, e.g. "bfloat16".

    Written with the keys of transformers 4, which transformers 5, vLLM and the converters of llama.cpp read too.
    """
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[shape.family]],
        "attention_dropout": 0.0,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": shape.init_std,
        "intermediate_size": shape.ffn_size,
        "max_position_embeddings": shape.max_positions,
        "model_type": shape.family,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_base,
        "rope_scaling": None,
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }
    if shape.family != "qwen2":
        config["attention_bias"] = False
    if shape.family == "llama":
        config["mlp_bias"] = False
    else:
        config["use_sliding_window"] = False
    if shape.rope_scaling:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_freq_factor,
            "high_freq_factor": shape.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_max_positions,
        }
    return config


def linear_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """FQN -> (N_out, K_in) of every linear that runs for each token, in order; the head, tied or not, is last."""
    D, F = shape.hidden_size, shape.ffn_size
    q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    linears: dict[str, tuple[int, int]] = {}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        linears |= {
            f"{prefix}.self_attn.q_proj": (q, D),
            f"{prefix}.self_attn.k_proj": (kv, D),
            f"{prefix}.self_attn.v_proj": (kv, D),
            f"{prefix}.self_attn.o_proj": (D, q),
            f"{prefix}.mlp.gate_proj": (F, D),
            f"{prefix}.mlp.up_proj": (F, D),
            f"{prefix}.mlp.down_proj": (D, F),
        }
    return linears | {"lm_head": (shape.vocab_size, D)}


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, by Hugging Face's names and in the model's order; a tied head has none."""
    D, linears = shape.hidden_size, linear_shapes(shape)
    parameters: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, D)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        parameters[f"{prefix}.input_layernorm.weight"] = (D,)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            fqn = f"{prefix}.self_attn.{name}"
            parameters[f"{fqn}.weight"] = linears[fqn]
            if shape.family == "qwen2" and name != "o_proj":
                parameters[f"{fqn}.bias"] = linears[fqn][:1]
        if shape.family == "qwen3":
            parameters[f"{prefix}.self_attn.q_norm.weight"] = (shape.head_size,)
            parameters[f"{prefix}.self_attn.k_norm.weight"] = (shape.head_size,)
        parameters[f"{prefix}.post_attention_layernorm.weight"] = (D,)
        for name in ("gate_proj", "up_proj", "down_proj"):
            parameters[f"{prefix}.mlp.{name}.weight"] = linears[f"{prefix}.mlp.{name}"]
    parameters["model.norm.weight"] = (D,)
    if not shape.tie_embeddings:
        parameters["lm_head.weight"] = linears["lm_head"]
    return parameters


def count_parameters(shape: ModelShape) -> int:
    """Number of trained values; a tied head counts once."""
    return sum(math.prod(size) for size in parameter_shapes(shape).values())


def flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """FLOPs of one token's forward and backward pass in a document of `seq_len` tokens, without recomputation.

    6 per weight of every linear, head included, plus 12 * layers * heads * head size * seq_len for attention: the
    formula of the PaLM paper (arXiv 2204.02311, appendix B), which by custom doesn't halve attention for causality.
    """
    weights = sum(n * k for n, k in linear_shapes(shape).values())
    return 6.0 * weights + 12.0 * shape.num_layers * shape.num_heads * shape.head_size * seq_len
