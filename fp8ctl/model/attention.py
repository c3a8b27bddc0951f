"""Causal attention over packed documents, in training and with a key/value cache.

A row holds several documents one after another, and no token sees another document. On a CPU, and in FP32, each
document is one call of PyTorch's `scaled_dot_product_attention`; on a GPU in BF16 all are one call of its
FlashAttention for variable lengths. Either way, what stands in one document can't move a single bit of another.

cuDNN's attention is kept out of the places where lengths vary: it plans a kernel for each length that it has not met,
which took 80 ms on an H200, longer than a whole decode step.

Letters: T new tokens, S tokens that they may see, N query heads, K key/value heads, G = N / K query heads on one
key/value head, H head size, B documents in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from fp8ctl.model.kv_cache import LayerCache

_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed row begin and end; made once per forward pass, used by every layer."""

    cu_seqlens: torch.Tensor
    """int32, 0 first and T last: document i holds tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
    bounds: tuple[int, ...]
    """The same on the host, for one wait of the host in a forward pass instead of one in each layer."""
    max_seqlen: int
    """New tokens of the longest document."""
    starts: tuple[int, ...] = ()
    """With a cache: position of each document's first new token, so also how many of its tokens the cache holds."""

    @cached_property
    def key_bounds(self) -> tuple[int, ...]:
        """Where each document's keys begin and end: those of the cache, then those of its new tokens."""
        if not any(self.starts):
            return self.bounds
        lengths = [s + b - a for s, (a, b) in zip(self.starts, pairwise(self.bounds), strict=True)]
        return tuple(accumulate(lengths, initial=0))

    @cached_property
    def cu_keylens(self) -> torch.Tensor:
        """`key_bounds` on the device."""
        if not any(self.starts):
            return self.cu_seqlens
        return torch.tensor(self.key_bounds, dtype=torch.int32, device=self.cu_seqlens.device)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every document goes on by exactly one token."""
        return self.bounds == tuple(range(len(self.bounds)))

    @cached_property
    def decode_rows_B(self) -> torch.Tensor:
        """In decode: the cache row of each token."""
        return torch.arange(len(self.starts), device=self.cu_seqlens.device)

    @cached_property
    def decode_positions_B(self) -> torch.Tensor:
        """In decode: the position of each token."""
        return torch.tensor(self.starts, device=self.cu_seqlens.device)

    @cached_property
    def decode_seen_BS(self) -> torch.Tensor:
        """In decode: which positions of its cache row each token sees, up to the longest row."""
        positions_S = torch.arange(max(self.starts) + 1, device=self.cu_seqlens.device)
        return positions_S <= self.decode_positions_B[:, None]


def attention(q_TNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, documents: Documents) -> torch.Tensor:
    """softmax(q k' / sqrt(H)) v inside each document, causal with the last query at the last key. Gives [T, N, H].

    N is a multiple of K. S = T, or more when the keys begin with those of a cache (`documents.key_bounds`).
    """
    if q_TNH.is_cuda and q_TNH.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q_TNH, k_SKH, v_SKH, documents)
    out = [
        _attend(q_TNH[a:b], k_SKH[c:d], v_SKH[c:d])
        for (a, b), (c, d) in zip(pairwise(documents.bounds), pairwise(documents.key_bounds), strict=True)
        if a < b
    ]
    return torch.cat(out) if len(out) > 1 else out[0]


def cached_attention(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, documents: Documents, cache: LayerCache
) -> torch.Tensor:
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


def _varlen(q_TNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, documents: Documents) -> torch.Tensor:
    """All documents in one kernel. Key/value heads are repeated, as not every version of it groups queries."""
    from torch.nn.attention.varlen import varlen_attn  # needs a PyTorch built for CUDA

    group = q_TNH.shape[1] // k_SKH.shape[1]
    longest = max(b - a for a, b in pairwise(documents.key_bounds))
    out_TNH = varlen_attn(
        q_TNH,
        k_SKH.repeat_interleave(group, dim=1),
        v_SKH.repeat_interleave(group, dim=1),
        documents.cu_seqlens,
        documents.cu_keylens,
        documents.max_seqlen,
        longest,
        window_size=(-1, 0),
    )
    assert isinstance(out_TNH, torch.Tensor), "a pair only when asked for"
    return out_TNH


def _attend(q_TNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor) -> torch.Tensor:
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


def _decode(
    q_BNH: torch.Tensor, k_BKH: torch.Tensor, v_BKH: torch.Tensor, documents: Documents, cache: LayerCache
) -> torch.Tensor:
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
