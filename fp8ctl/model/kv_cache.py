"""Keys and values of a batch of growing sequences: one static buffer, a row per sequence, filled from position 0.

There is no padding: a prompt is packed and computed as in training, and a token's keys and values are stored at its
position. The cache keeps no lengths. A forward pass says where its tokens stand through their position ids, and
document i of the pass continues row i. So `rows(a, b)` lets new prompts fill some rows while others wait, and `keep`
closes the gaps that finished sequences leave.

Letters: L layers, B rows, K key/value heads, S positions, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8ctl.config.schema import ModelShape
from fp8ctl.errors import ModelError


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    k_BKSH: torch.Tensor
    v_BKSH: torch.Tensor


class KVCache:
    """Buffer for `num_rows` sequences of up to `max_tokens` tokens each.

    Takes 2 * L * B * K * S * H values (`num_bytes`), all of them from the start.

    Raises:
        ModelError: `max_tokens` is more than the positions the model was made for.
    """

    def __init__(
        self, shape: ModelShape, *, num_rows: int, max_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if max_tokens > shape.max_positions:
            raise ModelError(
                f"sequences of {max_tokens:,} tokens are longer than the model's {shape.max_positions:,} positions",
                "use shorter prompts or a smaller max_new_tokens",
            )
        size = (shape.num_layers, num_rows, shape.num_kv_heads, max_tokens, shape.head_size)
        # Zeros, not empty memory: masked positions are multiplied by a weight of 0, and 0 * NaN would be NaN
        self.k_LBKSH = torch.zeros(size, dtype=dtype, device=device)
        self.v_LBKSH = torch.zeros(size, dtype=dtype, device=device)

    @property
    def num_rows(self) -> int:
        """B: sequences that fit."""
        return self.k_LBKSH.shape[1]

    @property
    def max_tokens(self) -> int:
        """S: tokens that fit into one row."""
        return self.k_LBKSH.shape[3]

    @property
    def num_bytes(self) -> int:
        """Memory of the buffer."""
        return self.k_LBKSH.nbytes + self.v_LBKSH.nbytes

    def layer(self, index: int) -> LayerCache:
        """Views of one layer's keys and values."""
        return LayerCache(self.k_LBKSH[index], self.v_LBKSH[index])

    def rows(self, start: int, stop: int) -> KVCache:
        """A cache that shares the memory of rows `start` to `stop` of this one."""
        view = object.__new__(KVCache)
        view.k_LBKSH, view.v_LBKSH = self.k_LBKSH[:, start:stop], self.v_LBKSH[:, start:stop]
        return view

    def keep(self, rows: Sequence[int]) -> None:
        """Moves `rows` (ascending) to the front: row i is what rows[i] was. The rest is free for new sequences."""
        assert list(rows) == sorted(set(rows)), "rows must ascend, or a row would be overwritten before it is moved"
        for new, old in enumerate(rows):
            if new != old:
                self.k_LBKSH[:, new] = self.k_LBKSH[:, old]
                self.v_LBKSH[:, new] = self.v_LBKSH[:, old]
