"""Random tokens, packed as training packs them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp8ctl.config.bench_schema import BenchStepConfig
from fp8ctl.config.constants import IGNORE_INDEX

# Documents of a web crawl: half are shorter than some 600 tokens, one in fifty is longer than 4,000
_MEDIAN_TOKENS, _SIGMA, _FEWEST_TOKENS = 600, 1.0, 16


@dataclass(frozen=True)
class Batch:
    """T = rows x seq_len tokens without a batch dimension; what `Transformer.forward` takes."""

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    labels_T: torch.Tensor
    rows: int
    seq_len: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.rows * self.seq_len

    @property
    def num_labels(self) -> int:
        """Tokens that carry loss: all but the last of each document."""
        return self.num_tokens - (len(self.cu_seqlens) - 1)


def make_batch(config: BenchStepConfig, vocab_size: int, device: torch.device) -> Batch:
    """Uniform tokens; document lengths as `config.documents` says. The same for the same seed, on any device."""
    generator = torch.Generator().manual_seed(config.seed)
    rows, seq_len = config.rows, config.seq_len_tokens
    ids_T = torch.randint(vocab_size, (rows * seq_len,), generator=generator)
    lengths: list[int] = []
    for _ in range(rows):
        lengths += [seq_len] if config.documents == "single" else _lengths(seq_len, generator)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    labels_T = ids_T.roll(-1)
    labels_T[bounds[1:] - 1] = IGNORE_INDEX
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    return Batch(
        ids_T.to(device),
        positions_T.to(device),
        bounds.to(device, torch.int32),
        max(lengths),
        labels_T.to(device),
        rows,
        seq_len,
    )


def _lengths(seq_len: int, generator: torch.Generator) -> list[int]:
    lengths: list[int] = []
    while (left := seq_len - sum(lengths)) > 0:
        drawn = math.exp(math.log(_MEDIAN_TOKENS) + _SIGMA * torch.randn((), generator=generator).item())
        lengths.append(min(left, max(_FEWEST_TOKENS, int(drawn))))
    return lengths
