"""Arms made of other people's layers: transformers, torchao, transformer-engine. All have this project's chunked loss on top.

Rows are a batch dimension here, [B, S, D]; each row is one document. Packages are imported when an arm is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fp8ctl.bench.arms import Arm
from fp8ctl.bench.batch import Batch
from fp8ctl.bench.ours import Weights
from fp8ctl.config.bench_schema import BenchStepConfig
from fp8ctl.errors import MissingPackageError
from fp8ctl.fp8.te import import_te
from fp8ctl.model.loss import default_chunk_tokens, linear_cross_entropy_sum
from fp8ctl.model.shapes import hf_config

_COMPILED_VARIANTS = 64


def build_hf(config: BenchStepConfig, weights: Weights, batch: Batch, torchao_recipe: str | None = None) -> Arm:
    """Hugging Face's decoder layers, each compiled on a GPU; with a recipe their linears are torchao's Float8Linear."""
    from transformers import AutoConfig, AutoModelForCausalLM

    is_gpu = weights.device.type == "cuda"
    settings = hf_config(weights.shape, "bfloat16")
    hf = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa")
    shared = {name: nn.Parameter(p.detach()) for name, p in weights.parameters.items()}
    model.load_state_dict(shared, strict=False, assign=True)
    backbone = model.model
    # its frequencies are a buffer, which no state dict holds
    backbone.rotary_emb = type(backbone.rotary_emb)(config=hf).to(weights.device)
    if torchao_recipe is not None:
        _to_torchao(backbone.layers, torchao_recipe)
    if is_gpu:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILED_VARIANTS)
        for layer in backbone.layers:
            layer.compile()
    positions_BS = batch.position_ids_T.view(batch.rows, batch.seq_len)[:1]

    def hidden() -> Tensor:
        x_BSD = backbone.embed_tokens(batch.input_ids_T.view(batch.rows, batch.seq_len))
        rope = backbone.rotary_emb(x_BSD, positions_BS)
        for layer in backbone.layers:
            call: Any = layer
            if config.activation_checkpointing:
                x_BSD = checkpoint(call, x_BSD, position_embeddings=rope, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BSD = call(x_BSD, position_embeddings=rope)
        return backbone.norm(x_BSD).flatten(0, 1)  # type: ignore[no-any-return]

    how = "decoder layers compiled, cuDNN attention" if is_gpu else "not compiled on a CPU"
    head = shared["model.embed_tokens.weight" if weights.shape.tie_embeddings else "lm_head.weight"]
    whose = "transformers" if torchao_recipe is None else f"transformers, torchao.float8 {torchao_recipe}"
    note = f"{whose}, {how}; this project's loss in place of whole logits"
    arm = _arm(hidden, head, list(shared.values()), weights.num_bytes, batch, note)
    return _with_cudnn(arm) if is_gpu else arm


def _to_torchao(layers: nn.Module, recipe: str) -> None:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as e:
        raise MissingPackageError(f"torchao is not here: {e}", "pip install torchao") from e
    convert_to_float8_training(layers, config=Float8LinearConfig.from_recipe_name(recipe))


def _arm(
    hidden: Callable[[], Tensor], head_VD: Tensor, parameters: Sequence[Tensor], own_bytes: int, batch: Batch, note: str
) -> Arm:
    """The loss of this project on somebody's hidden states [T, D]."""

    def loss() -> Tensor:
        hidden_TD = hidden()
        chunk_tokens = default_chunk_tokens(hidden_TD.device)
        total = linear_cross_entropy_sum(hidden_TD, head_VD, batch.labels_T, chunk_tokens=chunk_tokens)
        return total / batch.num_labels

    return Arm(loss=loss, parameters=parameters, own_bytes=own_bytes, note=note)


def _with_cudnn(arm: Arm) -> Arm:
    """Forces cuDNN's attention, in backward too, where layers may be computed again."""
    plain = arm.loss

    def loss() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return plain()

    def backward(value: Tensor) -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            value.backward()  # type: ignore[no-untyped-call]

    arm.loss, arm.backward = loss, backward
    return arm


# ---------------------------------------------------------------- transformer-engine


class TeLayers:
    """A stack of TransformerLayer for each recipe; all on one set of weights of their own."""

    def __init__(self, config: BenchStepConfig, weights: Weights, batch: Batch) -> None:
        self._config, self._weights, self._batch = config, weights, batch
        self._first: nn.ModuleList | None = None

    def build(self, recipe: str) -> Arm:
        """The arm `te-RECIPE`: bf16, block, current or delayed.

        Raises:
            MissingPackageError: transformer-engine is absent or broken.
        """
        try:
            te = import_te()
        except Exception as e:  # a broken one fails in many ways
            raise MissingPackageError(
                f"transformer-engine is not here: {type(e).__name__}: {e}".splitlines()[0], "pip install 'fp8ctl[te]'"
            ) from e
        layers = self._stack(te)
        shape, batch, checkpoints = self._weights.shape, self._batch, self._config.activation_checkpointing
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        names += [] if shape.tie_embeddings else ["lm_head.weight"]
        shared = {name: nn.Parameter(self._weights.parameters[name].detach()) for name in names}
        rope = te.RotaryPositionEmbedding(shape.head_size, rotary_base=shape.rope_base)(batch.seq_len)
        autocast = _te_autocast(te, recipe)

        def hidden() -> Tensor:
            ids_BS = batch.input_ids_T.view(batch.rows, batch.seq_len)
            x_BSD = functional.embedding(ids_BS, shared["model.embed_tokens.weight"])
            with autocast():
                for layer in layers:
                    if checkpoints:
                        x_BSD = te.checkpoint(layer, x_BSD, rotary_pos_emb=rope, use_reentrant=False)
                    else:
                        x_BSD = layer(x_BSD, rotary_pos_emb=rope)
            norm = shared["model.norm.weight"]
            return functional.rms_norm(x_BSD, norm.shape, norm, shape.rms_norm_eps).flatten(0, 1)

        parameters = [*layers.parameters(), *shared.values()]
        head = shared[names[0] if shape.tie_embeddings else names[-1]]
        note = "TransformerLayer stack, fused attention, rotary embedding and SwiGLU; this project's loss"
        if shape.family == "qwen2":
            note += "; no bias on q, k, v: TransformerLayer has one on all linears or on none"
        return _arm(hidden, head, parameters, sum(p.nbytes for p in parameters), batch, note)

    def _stack(self, te: Any) -> nn.ModuleList:
        shape = self._weights.shape

        def init(weight: Tensor) -> None:
            nn.init.normal_(weight, 0.0, shape.init_std)

        layers = nn.ModuleList()
        for number in range(shape.num_layers):
            layer = te.TransformerLayer(
                shape.hidden_size,
                shape.ffn_size,
                shape.num_heads,
                num_gqa_groups=shape.num_kv_heads,
                kv_channels=shape.head_size,
                layernorm_epsilon=shape.rms_norm_eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                init_method=init,
                output_layer_init_method=init,
                layer_number=number + 1,
                self_attn_mask_type="causal",
                params_dtype=torch.bfloat16,
                fuse_qkv_params=True,
                bias=False,
                activation="swiglu",
                normalization="RMSNorm",
                attn_input_format="bshd",
                device=self._weights.device,
            )
            if self._first is not None:
                for mine, shared in zip(layer.parameters(), self._first[number].parameters(), strict=True):
                    mine.data = shared.data
            layers.append(layer)
        self._first = self._first or layers
        return layers


def _te_autocast(te: Any, recipe: str) -> Callable[[], Any]:
    from transformer_engine.common import recipe as recipes

    if recipe == "bf16":
        return contextlib.nullcontext
    kind = {
        "block": recipes.Float8BlockScaling,
        "current": recipes.Float8CurrentScaling,
        "delayed": recipes.DelayedScaling,
    }[recipe]()
    # fp8_autocast is what releases before 2.9 call it
    if hasattr(te, "autocast"):
        return lambda: te.autocast(enabled=True, recipe=kind)
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=kind)
