"""Causal attention over packed documents, in training and with a key/value cache.

A row holds several documents one after another, and no token sees another document. On a CPU, and in FP32, each
document is one call of PyTorch's `scaled_dot_product_attention`. On a GPU in BF16 all documents are one kernel, whose
kind is chosen once for a model (`attention_choice.py`):

    cudnn        cuDNN where documents of equal length fill the rows, an error for different lengths
    cudnn+flash  cuDNN where documents of equal length fill the rows, FlashAttention for different lengths
    flash        FlashAttention always
    any          each document by itself, by whatever PyTorch picks

None of them copies key/value heads for their group of query heads, none falls back to another, and what stands in one
document can't move a single bit of another.

cuDNN's attention is kept out of generation, where lengths change all the time: it plans a kernel for each length that
it has not met, which took 80 ms on an H200, longer than a whole decode step. PyTorch's way to it for documents of different
lengths (an internal operator) gave wrong gradients there (2.11, cuDNN 9.19), so there is none here.

Letters: T new tokens, S tokens that they may see, N query heads, K key/value heads, G = N / K query heads on one
key/value head, H head size, B documents in a batch, R tokens of each document when all are as long.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fp8ctl.errors import ModelError

if TYPE_CHECKING:
    from fp8ctl.model.kv_cache import LayerCache

AttentionKind = Literal["cudnn", "cudnn+flash", "flash", "any"]

_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Below, a document is less than a cuDNN tile and rows of such lengths are chance: not worth a plan of their own
_SHORTEST_ROW = 64


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed row begin and end; made once per forward pass, used by every layer."""

    cu_seqlens: Tensor
    """int32, 0 first and T last: document i holds tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
    bounds: tuple[int, ...]
    """The same on the host, for one wait of the host in a forward pass instead of one in each layer."""
    max_seqlen: int
    """New tokens of the longest document, or more."""
    starts: tuple[int, ...] = ()
    """With a cache: position of each document's first new token, so also how many of its tokens the cache holds."""
    kind: AttentionKind = "flash"
    """Which kernel a GPU runs in BF16."""

    @cached_property
    def row_tokens(self) -> int:
        """R: tokens of each document if all are equally long, else 0."""
        lengths = {b - a for a, b in pairwise(self.bounds)}
        return lengths.pop() if len(lengths) == 1 else 0

    @cached_property
    def key_bounds(self) -> tuple[int, ...]:
        """Where each document's keys begin and end: those of the cache, then those of its new tokens."""
        if not any(self.starts):
            return self.bounds
        lengths = [s + b - a for s, (a, b) in zip(self.starts, pairwise(self.bounds), strict=True)]
        return tuple(accumulate(lengths, initial=0))

    @cached_property
    def cu_keylens(self) -> Tensor:
        """`key_bounds` on the device."""
        if not any(self.starts):
            return self.cu_seqlens
        return torch.tensor(self.key_bounds, dtype=torch.int32, device=self.cu_seqlens.device)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every document goes on by exactly one token."""
        return self.bounds == tuple(range(len(self.bounds)))

    @cached_property
    def decode_rows_B(self) -> Tensor:
        """In decode: the cache row of each token."""
        return torch.arange(len(self.starts), device=self.cu_seqlens.device)

    @cached_property
    def decode_positions_B(self) -> Tensor:
        """In decode: the position of each token."""
        return torch.tensor(self.starts, device=self.cu_seqlens.device)

    @cached_property
    def decode_seen_BS(self) -> Tensor:
        """In decode: which positions of its cache row each token sees, up to the longest row."""
        positions_S = torch.arange(max(self.starts) + 1, device=self.cu_seqlens.device)
        return positions_S <= self.decode_positions_B[:, None]


def attention(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, documents: Documents) -> Tensor:
    """softmax(q k' / sqrt(H)) v inside each document, causal with the last query at the last key. Gives [T, N, H].

    N is a multiple of K. S = T, or more when the keys begin with those of a cache (`documents.key_bounds`). All three
    may be views into a wider buffer.
    """
    if q_TNH.is_cuda and q_TNH.dtype in (torch.bfloat16, torch.float16) and documents.kind != "any":
        if documents.starts or documents.kind == "flash":
            return flash(q_TNH, k_SKH, v_SKH, documents)
        if documents.row_tokens >= _SHORTEST_ROW:
            return cudnn_rows(q_TNH, k_SKH, v_SKH, documents.row_tokens)
        if documents.kind == "cudnn":
            raise ModelError(
                "attention=cudnn takes rows full of documents of equal length only, these differ",
                "set engine.attention=auto: cuDNN for such rows, FlashAttention for others",
            )
        return flash(q_TNH, k_SKH, v_SKH, documents)
    out = [
        _attend(q_TNH[a:b], k_SKH[c:d], v_SKH[c:d])
        for (a, b), (c, d) in zip(pairwise(documents.bounds), pairwise(documents.key_bounds), strict=True)
        if a < b
    ]
    return torch.cat(out) if len(out) > 1 else out[0]


def cached_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, documents: Documents, cache: LayerCache) -> Tensor:
    """Stores the new keys and values, then attends to all the cache holds of the same document. Gives [T, N, H]."""
    if documents.is_decode:
        return _decode(q_TNH, k_TKH, v_TKH, documents, cache)
    keys, values = [], []
    for row, (start, (a, b)) in enumerate(zip(documents.starts, pairwise(documents.bounds), strict=True)):
        end = start + b - a
        cache.k_BKSH[row, :, start:end] = k_TKH[a:b].transpose(0, 1)
        cache.v_BKSH[row, :, start:end] = v_TKH[a:b].transpose(0, 1)
        keys.append(cache.k_BKSH[row, :, :end].transpose(0, 1))
        values.append(cache.v_BKSH[row, :, :end].transpose(0, 1))
    if any(documents.starts):
        return attention(q_TNH, torch.cat(keys), torch.cat(values), documents)
    # The same call as in training: a prompt's logits are those of the full forward pass to the bit
    return attention(q_TNH, k_TKH, v_TKH, documents)


def cudnn_rows(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, row_tokens: int) -> Tensor:
    """T / R documents of R tokens each, by cuDNN or not at all. Gives [T, N, H]."""
    q, k, v = (x.unflatten(0, (-1, row_tokens)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


def flash(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, documents: Documents) -> Tensor:
    """All documents in one kernel of FlashAttention. Gives [T, N, H]."""
    from torch.nn.attention.varlen import varlen_attn  # needs a PyTorch built for CUDA

    cu_keylens, longest = documents.cu_seqlens, documents.max_seqlen
    if documents.starts:
        cu_keylens = documents.cu_keylens
        longest = max(b - a for a, b in pairwise(documents.key_bounds))
    out_TNH = varlen_attn(
        q_TNH,
        k_SKH,
        v_SKH,
        documents.cu_seqlens,
        cu_keylens,
        documents.max_seqlen,
        longest,
        window_size=(-1, 0),
        **_grouping(q_TNH.shape[1] != k_SKH.shape[1]),
    )
    assert isinstance(out_TNH, Tensor), "a pair only when asked for"
    return out_TNH


@cache
def _grouping(is_grouped: bool) -> dict[str, Any]:
    """The argument that lets query heads share key/value heads, which older versions of the function do unasked."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": is_grouped} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _attend(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor) -> Tensor:
    """One document by itself. Gives [T, N, H]."""
    T, S, dtype = len(q_TNH), len(k_SKH), q_TNH.dtype
    if not q_TNH.is_cuda:
        # PyTorch's CPU kernel is no slower in FP32 than in BF16, and a step over short documents becomes 6 % faster
        q_TNH, k_SKH, v_SKH = q_TNH.float(), k_SKH.float(), v_SKH.float()
    seen_TS = None
    if T != S:
        seen_TS = torch.ones(T, S, dtype=torch.bool, device=q_TNH.device).tril(diagonal=S - T)
    out_1NTH = scaled_dot_product_attention(
        q_TNH.transpose(0, 1).unsqueeze(0),
        k_SKH.transpose(0, 1).unsqueeze(0),
        v_SKH.transpose(0, 1).unsqueeze(0),
        attn_mask=seen_TS,
        is_causal=seen_TS is None,
        enable_gqa=q_TNH.shape[1] != k_SKH.shape[1],
    )
    return out_1NTH.squeeze(0).transpose(0, 1).to(dtype)


def _decode(q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor, documents: Documents, cache: LayerCache) -> Tensor:
    """One new token of each document, all documents in one call. Gives [B, N, H]."""
    (B, N, H), K = q_BNH.shape, k_BKH.shape[1]
    seen_BS = documents.decode_seen_BS
    S = seen_BS.shape[1]
    cache.k_BKSH[documents.decode_rows_B, :, documents.decode_positions_B] = k_BKH
    cache.v_BKSH[documents.decode_rows_B, :, documents.decode_positions_B] = v_BKH
    with sdpa_kernel(_ANY_LENGTH):
        # The query heads of one key/value head stand where query tokens usually do: nothing is copied for grouping
        out_BKGH = scaled_dot_product_attention(
            q_BNH.view(B, K, N // K, H),
            cache.k_BKSH[:B, :, :S],
            cache.v_BKSH[:B, :, :S],
            attn_mask=seen_BS[:, None, None],
        )
    return out_BKGH.reshape(B, N, H)
