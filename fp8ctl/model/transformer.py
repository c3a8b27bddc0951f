"""The transformer of Llama, Qwen2 and Qwen3, from top to bottom: norm, rotary embedding, attention, feed-forward,
block, model.

Several documents lie packed in one row without a batch dimension; `cu_seqlens` says where each begins. Parameter
names are Hugging Face's. Every linear is a plain `nn.Linear`: which of them run in FP8 is another layer's business.

Three habits serve the engines around the model. Every parameter is used only inside the forward of the module that
owns it (the tied head runs inside the embedding), because ZeRO-3 gathers parameters with module hooks. There are no
buffers, because an engine that casts a model to BF16 would cast FP32 rotary frequencies too. The loss is computed
inside `Transformer.forward`, so that an engine's wrapper sees all of the model's work.

Letters: T packed tokens, D hidden, F feed-forward, N query heads, K key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8ctl.config.schema import ModelShape
from fp8ctl.errors import ModelError
from fp8ctl.model.attention import AttentionKind, Documents, attention, cached_attention
from fp8ctl.model.fused import add_norm, norm, rotate_qk, silu_mul
from fp8ctl.model.head import Embedding, Head, TiedHead, head_loss
from fp8ctl.model.kv_cache import KVCache, LayerCache
from fp8ctl.model.loss import default_chunk_tokens
from fp8ctl.model.shapes import check_shape


def together(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Outputs of linears that share an input: in one call where the first knows how (`forward_together(x, linears)`),
    else one by one. They may be views into one wide buffer.
    """
    if (joined := getattr(linears[0], "forward_together", None)) is not None:
        return tuple(joined(x, linears))
    return tuple(linear(x) for linear in linears)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in FP32 inside whatever the dtype of x."""

    compile_kernels = False

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Any:
        """Any shape that ends in `size`; keeps shape and dtype. With `delta`: the pair (x + delta, its norm)."""
        if delta is None:
            return norm(x, self.weight, self.eps, compiled=self.compile_kernels)
        return add_norm(x, delta, self.weight, self.eps, compiled=self.compile_kernels)


def rope_frequencies(shape: ModelShape, device: torch.device | str = "cpu") -> Tensor:
    """FP32 [H / 2]: radians per position of each pair, rope_base^(-2i / H), stretched where Llama 3 says so."""
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32, device=device) / shape.head_size
    frequencies = 1.0 / shape.rope_base**exponents
    if (scaling := shape.rope_scaling) is None:
        return frequencies
    # Llama 3.1: wavelengths over original / low_freq_factor are stretched by `factor`, those under original /
    # high_freq_factor stay, and those between are interpolated linearly in the number of turns over the original
    # context
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1.0 - keep) * frequencies / scaling.factor + keep * frequencies


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; bias on q, k, v (Qwen2) or RMSNorm on q and k heads (Qwen3)."""

    compile_kernels = False
    runs_linears_together = True
    """For ZeRO-3: weights of children may be used outside their own forward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        D, H = shape.hidden_size, shape.head_size
        has_bias = shape.family == "qwen2"
        self.head_size = H
        self.q_proj = nn.Linear(D, shape.num_heads * H, bias=has_bias)
        self.k_proj = nn.Linear(D, shape.num_kv_heads * H, bias=has_bias)
        self.v_proj = nn.Linear(D, shape.num_kv_heads * H, bias=has_bias)
        self.o_proj = nn.Linear(shape.num_heads * H, D, bias=False)
        has_norm = shape.family == "qwen3"
        self.q_norm = RMSNorm(H, shape.rms_norm_eps) if has_norm else None
        self.k_norm = RMSNorm(H, shape.rms_norm_eps) if has_norm else None

    def forward(
        self,
        x_TD: Tensor,
        cos_TH: Tensor,
        sin_TH: Tensor,
        documents: Documents,
        cache: LayerCache | None,
    ) -> Tensor:
        """[T, D] -> [T, D]."""
        qkv = together(x_TD, self.q_proj, self.k_proj, self.v_proj)
        q_TNH, k_TKH, v_TKH = (x.unflatten(-1, (-1, self.head_size)) for x in qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = rotate_qk(q_TNH, k_TKH, cos_TH, sin_TH, compiled=self.compile_kernels)
        # What attention keeps of a view would keep q and k of before the rotation alive as well
        v_TKH = v_TKH.contiguous()
        if cache is None:
            out_TNH = attention(q_TNH, k_TKH, v_TKH, documents)
        else:
            out_TNH = cached_attention(q_TNH, k_TKH, v_TKH, documents, cache)
        return self.o_proj(out_TNH.flatten(1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    compile_kernels = False

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        gate_TF, up_TF = together(x_TD, self.gate_proj, self.up_proj)
        # A module that stands in for this one may call this very function
        is_compiled = getattr(self, "compile_kernels", False)
        return self.down_proj(silu_mul(gate_TF, up_TF, compiled=is_compiled))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and beside the residual stream.

    What a feed-forward adds to the stream is left to the next norm, which adds it on its way: one pass over memory.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        cos_TH: Tensor,
        sin_TH: Tensor,
        documents: Documents,
        cache: LayerCache | None,
    ) -> tuple[Tensor, Tensor]:
        """Residual stream [T, D] and what is still to be added to it; gives the same two."""
        if delta_TD is None:
            normed_TD = self.input_layernorm(x_TD)
        else:
            x_TD, normed_TD = self.input_layernorm(x_TD, delta_TD)
        delta_TD = self.self_attn(normed_TD, cos_TH, sin_TH, documents, cache)
        x_TD, normed_TD = self.post_attention_layernorm(x_TD, delta_TD)
        return x_TD, self.mlp(normed_TD)


class Backbone(nn.Module):
    """Everything from token ids to the hidden states under the head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Transformer(nn.Module):
    """A decoder-only language model; weights are drawn from normal(0, shape.init_std) with torch's global generator.

    `lm_head` maps hidden states to logits or to the loss: a `Head`, or a `TiedHead` without parameters when embeddings
    are tied. Any module from hidden states to logits may take its place.

    Raises:
        ModelError: the sizes don't fit together.
    """

    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of storing its activations."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at once while the loss is computed; None: what suits the device."""
    attention_kind: AttentionKind = "flash"
    """Kernel of attention on a GPU in BF16, from `attention_choice.choose_attention`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        check_shape(shape)
        self.shape = shape
        self.model = Backbone(shape)
        if shape.tie_embeddings:
            self.lm_head: nn.Module = TiedHead(self.model.embed_tokens)
        else:
            self.lm_head = Head(shape.hidden_size, shape.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all matrices from normal(0, init_std) in the order of their names; biases become 0 and norms 1."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, self.shape.init_std)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    @property
    def head_weight(self) -> nn.Parameter:
        """Weight [V, D] of the output head: the embedding's when tied."""
        owner = self.model.embed_tokens if isinstance(self.lm_head, TiedHead) else self.lm_head
        return owner.weight  # type: ignore[return-value]

    @property
    def compile_kernels(self) -> bool:
        """Whether norms, rotary embedding and SwiGLU run through torch.compile while training on a GPU. Set it once
        the modules are what they will be.
        """
        return self.model.norm.compile_kernels

    @compile_kernels.setter
    def compile_kernels(self, is_on: bool) -> None:
        for module in self.model.modules():
            module.compile_kernels = is_on  # type: ignore[assignment]

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cache: KVCache | None = None,
        labels_T: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, D] after the final norm; with `labels_T` the FP32 sum of the token losses (model/loss.py).

        `cu_seqlens` (int32, from 0 to T) bounds the documents, `position_ids_T` restarts in each. With a cache,
        document i continues row i of it at its first position id, and no document is empty.
        """
        documents = self._documents(position_ids_T, cu_seqlens, max_seqlen, cache)
        # In FP32 always: BF16 holds integers only up to 256
        angles_TH = position_ids_T.float()[:, None] * rope_frequencies(self.shape, position_ids_T.device)
        cos_TH, sin_TH = angles_TH.cos(), angles_TH.sin()

        recompute = self.activation_checkpointing and cache is None and torch.is_grad_enabled()
        x_TD: Tensor = self.model.embed_tokens(input_ids_T)
        delta_TD: Tensor | None = None
        for index, block in enumerate(self.model.layers):
            if recompute:
                # Added here, so that one tensor is kept for each block and not two
                x_TD, delta_TD = checkpoint(
                    block,
                    x_TD if delta_TD is None else x_TD + delta_TD,
                    *(None, cos_TH, sin_TH, documents, None),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                layer_cache = cache.layer(index) if cache is not None else None
                x_TD, delta_TD = block(x_TD, delta_TD, cos_TH, sin_TH, documents, layer_cache)
        _, hidden_TD = self.model.norm(x_TD, delta_TD)
        if labels_T is None:
            return hidden_TD
        chunk_tokens = self.loss_chunk_tokens or default_chunk_tokens(hidden_TD.device)
        return head_loss(self.lm_head, hidden_TD, labels_T, chunk_tokens=chunk_tokens)

    def _documents(
        self, position_ids_T: Tensor, cu_seqlens: Tensor, max_seqlen: int, cache: KVCache | None
    ) -> Documents:
        bounds = tuple(cu_seqlens.tolist())
        if cache is not None:
            starts = tuple(position_ids_T[cu_seqlens[:-1].long()].tolist())
            return Documents(cu_seqlens, bounds, max_seqlen, starts, "flash")
        # A power of two: few values, since some kernels are planned or compiled anew for each
        longest = 1 << max(max_seqlen - 1, 0).bit_length()
        documents = Documents(cu_seqlens, bounds, longest, (), self.attention_kind)
        _ = documents.row_tokens  # worked out here, outside of what may be compiled
        return documents

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, D] -> [T, V] in the dtype of the model."""
        return self.lm_head(hidden_TD)

    @torch.no_grad()
    def extend(self, cache: KVCache, tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Appends `tokens[i]` to row i of the cache, which holds `starts[i]` tokens; FP32 logits [B, V] of the next
        one.

        One call with whole prompts and starts of 0 fills the rows; then each call brings one token for each row.

        Raises:
            ModelError: a row gets no token, there are more rows than the cache has, or a sequence outgrows it.
        """
        _check_extension(cache, tokens, starts)
        device = self.head_weight.device
        lengths = [len(row) for row in tokens]
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        hidden_TD = self(
            torch.tensor([token for row in tokens for token in row], device=device),
            torch.tensor([s + i for s, n in zip(starts, lengths, strict=True) for i in range(n)], device=device),
            bounds,
            max(lengths),
            cache=cache,
        )
        return self.logits(hidden_TD[bounds[1:].long() - 1]).float()


def _check_extension(cache: KVCache, tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
    if not tokens or not all(len(row) for row in tokens):
        raise ModelError(
            "a sequence without tokens can't be continued", "give each row at least one token, e.g. the BOS token"
        )
    if len(tokens) > cache.num_rows:
        raise ModelError(f"{len(tokens)} sequences don't fit a cache of {cache.num_rows} rows", "use a smaller batch")
    longest = max(start + len(row) for start, row in zip(starts, tokens, strict=True))
    if longest > cache.max_tokens:
        raise ModelError(
            f"a sequence of {longest:,} tokens outgrows the cache of {cache.max_tokens:,}",
            "make the cache larger or stop earlier",
        )
