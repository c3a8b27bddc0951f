"""Causal attention over packed documents, in training and with a key/value cache.

A row holds several documents one after another; no token sees another document. Every document is one call of PyTorch's
`scaled_dot_product_attention`, so what stands in one document can't move a single bit of another. A kernel for variable
lengths would replace the loop of `attention`: `Documents` carries what such kernels ask for.

Letters: T packed tokens, S tokens a query may see, N query heads, K key/value heads, G = N / K query heads on one
key/value head, H head size, B documents in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from fp8ctl.model.kv_cache import LayerCache


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed row begin and end; made once per forward pass, used by every layer."""

    cu_seqlens: torch.Tensor
    """int32, 0 first and T last: document i holds tokens cu_seqlens[i] to cu_seqlens[i + 1]."""
    bounds: tuple[int, ...]
    """The same on the host, for one wait of the host in a forward pass instead of one in each layer."""
    max_seqlen: int
    """Tokens of the longest document."""
    starts: tuple[int, ...] = ()
    """With a cache: position of each document's first new token, so also how many of its tokens the cache holds."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(begin, end) of each document."""
        return list(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    @cached_property
    def is_decode(self) -> bool:
        """Whether every document brings exactly one token."""
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


def attention(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, documents: Documents) -> torch.Tensor:
    """softmax(q k' / sqrt(H)) v, causal and inside each document; N a multiple of K. Gives [T, N, H]."""
    out = [
        _attend(q_TNH[a:b].transpose(0, 1), k_TKH[a:b].transpose(0, 1), v_TKH[a:b].transpose(0, 1))
        for a, b in documents.spans
        if a < b
    ]
    return torch.cat(out) if len(out) > 1 else out[0]


def cached_attention(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, documents: Documents, cache: LayerCache
) -> torch.Tensor:
    """Stores the new keys and values, then attends to all the cache holds of the same document. Gives [T, N, H]."""
    if documents.is_decode:
        return _decode(q_TNH, k_TKH, v_TKH, documents, cache)
    out = []
    for row, ((a, b), start) in enumerate(zip(documents.spans, documents.starts, strict=True)):
        end = start + b - a
        cache.k_BKSH[row, :, start:end] = k_TKH[a:b].transpose(0, 1)
        cache.v_BKSH[row, :, start:end] = v_TKH[a:b].transpose(0, 1)
        if start == 0:
            # The same call as in training: a prompt's logits are those of the full forward pass to the bit
            seen = None
        else:
            seen = torch.ones(b - a, end, dtype=torch.bool, device=q_TNH.device).tril(diagonal=start)
        out.append(_attend(q_TNH[a:b].transpose(0, 1), cache.k_BKSH[row, :, :end], cache.v_BKSH[row, :, :end], seen))
    return torch.cat(out)


def _attend(
    q_NTH: torch.Tensor, k_KSH: torch.Tensor, v_KSH: torch.Tensor, seen_TS: torch.Tensor | None = None
) -> torch.Tensor:
    """One document; `seen_TS` says which keys a query sees, None means causal with T = S. Gives [T, N, H]."""
    dtype = q_NTH.dtype
    if q_NTH.device.type == "cpu":
        # PyTorch's CPU kernel is no slower in FP32 than in BF16, and a step over short documents becomes 6 % faster
        q_NTH, k_KSH, v_KSH = q_NTH.float(), k_KSH.float(), v_KSH.float()
    out_1NTH = scaled_dot_product_attention(
        q_NTH.unsqueeze(0),
        k_KSH.unsqueeze(0),
        v_KSH.unsqueeze(0),
        attn_mask=seen_TS,
        is_causal=seen_TS is None,
        enable_gqa=q_NTH.shape[0] != k_KSH.shape[0],
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
    # The query heads of one key/value head stand where query tokens usually do: no key or value is copied for them
    out_BKGH = scaled_dot_product_attention(
        q_BNH.view(B, K, N // K, H), cache.k_BKSH[:B, :, :S], cache.v_BKSH[:B, :, :S], attn_mask=seen_BS[:, None, None]
    )
    return out_BKGH.reshape(B, N, H)
