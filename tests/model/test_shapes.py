import pytest
import torch
import transformers

from fp8ctl.config.schema import ModelShape
from fp8ctl.errors import ModelError
from fp8ctl.model.shapes import (
    count_parameters,
    flops_per_token,
    hf_config,
    linear_shapes,
    parameter_shapes,
    shape_from_hf_config,
)

QWEN2_5_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}
LLAMA_3_2_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}


def test_published_parameter_counts():
    """Sizes that the models' cards state: 1.54B, 1.24B and 0.6B."""
    assert count_parameters(shape_from_hf_config(QWEN2_5_1_5B)) == 1_543_714_304
    assert count_parameters(shape_from_hf_config(LLAMA_3_2_1B)) == 1_235_814_400
    qwen3_0_6b = QWEN2_5_1_5B | {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert count_parameters(shape_from_hf_config(qwen3_0_6b)) == 596_049_920


def test_config_round_trip_through_transformers(kind, hf_model):
    theirs = hf_model(kind).config
    shape = shape_from_hf_config(theirs.to_dict())
    ours = hf_config(shape, "float32")
    again = transformers.AutoConfig.for_model(**ours)
    assert shape_from_hf_config(again.to_dict()) == shape
    for key in ("rope_parameters", "tie_word_embeddings", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(again, key, None) == getattr(theirs, key, None), key
    assert again.dtype in ("float32", torch.float32)


def test_old_and_new_rope_keys_mean_the_same():
    old = shape_from_hf_config(LLAMA_3_2_1B)
    scaling = LLAMA_3_2_1B["rope_scaling"]
    new = {k: v for k, v in LLAMA_3_2_1B.items() if not k.startswith("rope")}
    assert shape_from_hf_config(new | {"rope_parameters": {**scaling, "rope_theta": 500000.0}}) == old
    assert old.rope_base == 500000.0
    assert old.rope_scaling is not None and old.rope_scaling.factor == 32.0


def test_heads_default_as_in_transformers():
    plain = {k: v for k, v in QWEN2_5_1_5B.items() if k != "num_key_value_heads"}
    assert shape_from_hf_config(plain).num_kv_heads == 12
    assert shape_from_hf_config(plain).head_size == 128
    assert shape_from_hf_config(plain | {"model_type": "qwen3", "hidden_size": 1024}).head_size == 128


def test_linears_are_all_matrices_but_the_embedding(kind, hf_model):
    model = hf_model(kind)
    shape = shape_from_hf_config(model.config.to_dict())
    theirs = {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linear_shapes(shape) == theirs
    assert list(linear_shapes(shape))[-1] == "lm_head"
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(shape)
    assert count_parameters(shape) == model.num_parameters()


def test_flops_follow_the_formula():
    shape = shape_from_hf_config(LLAMA_3_2_1B)
    per_block = 2048 * (2048 + 512 + 512 + 2048 + 3 * 8192)
    assert flops_per_token(shape, 4096) == 6 * (16 * per_block + 128256 * 2048) + 12 * 16 * 2048 * 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model type 'mixtral' is not supported"),
        ({"model_type": None}, "model type None is not supported"),
        ({"hidden_size": None, "vocab_size": None}, "config.json lacks vocab_size, hidden_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"partial_rotary_factor": 0.5}, "a part of the head"),
        ({"model_type": "llama", "attention_bias": True, "mlp_bias": True}, "attention_bias; mlp_bias"),
        ({"num_key_value_heads": 5}, "12 query heads can't share 5 key/value heads evenly"),
        ({"head_dim": 63}, "head size 63 is odd"),
        (
            {"hidden_size": -5, "num_hidden_layers": "two"},
            "config.json holds values that fit no model: num_layers, hidden_size",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config.json holds values that fit no model: factor"),
    ],
)
def test_what_would_change_the_formula_is_refused(change, message):
    with pytest.raises(ModelError, match=message) as e:
        shape_from_hf_config(QWEN2_5_1_5B | change)
    assert e.value.hint


def test_all_problems_are_said_at_once():
    with pytest.raises(ModelError, match="hidden_act 'gelu'; sliding-window attention; rope type 'yarn'"):
        shape_from_hf_config(
            QWEN2_5_1_5B | {"hidden_act": "gelu", "use_sliding_window": True, "rope_scaling": {"type": "yarn"}}
        )


def test_qwen2_may_say_that_it_has_a_bias():
    assert shape_from_hf_config(QWEN2_5_1_5B | {"attention_bias": True}).family == "qwen2"


def test_a_shape_without_scaling_writes_none():
    config = hf_config(ModelShape(**(shape_from_hf_config(QWEN2_5_1_5B).model_dump())), "bfloat16")
    assert config["rope_scaling"] is None
    assert config["torch_dtype"] == "bfloat16"
