"""Which source a row comes from: a pure function of the phases and the row's number.

Within a phase each source's rows are spread evenly: row k of a source with share w is due at time (k + 1/2) / w, and rows follow
each other in the order of these times. So after any number n of rows each source has given about w * n, and where the mixture
stands is known from n alone. A source goes on in a new phase where it was: no row is read twice, none is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8ctl.config.schema import DataConfig, MixSource
from fp8ctl.errors import ConfigError

_MOST_EPOCHS = 4
"""More repetitions of the same text than this teach little (arXiv 2305.16264)."""


@dataclass(frozen=True)
class Phase:
    """A stretch of the run with one mixture."""

    start_row: int
    shares: tuple[float, ...]
    """Share of each source of the run; 0 where it has no part. They add up to 1."""


class Mixture:
    """Phases of a run, in order; the first starts at row 0."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self._firsts: list[list[int]] = [[0] * len(phases[0].shares)]
        for phase, following in zip(self.phases, self.phases[1:], strict=False):
            taken = _counts(phase.shares, following.start_row - phase.start_row)
            self._firsts.append([a + b for a, b in zip(self._firsts[-1], taken, strict=True)])

    def phase_of(self, row: int) -> int:
        """Number of the phase that a row belongs to."""
        return max(i for i, phase in enumerate(self.phases) if phase.start_row <= row)

    def counts(self, row: int) -> list[int]:
        """How many rows each source has given before a row."""
        number = self.phase_of(row)
        taken = _counts(self.phases[number].shares, row - self.phases[number].start_row)
        return [a + b for a, b in zip(self._firsts[number], taken, strict=True)]

    def locate(self, row: int) -> tuple[int, int]:
        """(source, number of the row among all rows of that source)."""
        number = self.phase_of(row)
        shares = self.phases[number].shares
        taken = _counts(shares, row - self.phases[number].start_row)
        source = _next(shares, taken)
        return source, self._firsts[number][source] + taken[source]


def make_mixture(data: DataConfig, paths: Sequence[str], rows_per_epoch: Sequence[int], rows_per_step: int) -> Mixture:
    """The mixture that settings describe.

    Args:
        paths: every source of the run once, see `source_paths`.
        rows_per_epoch: of each.
        rows_per_step: global batch, which makes rows of the phases' steps.

    Raises:
        ConfigError: a phase names the same data twice, or mixes weights and epochs.
    """
    phases = []
    for first_step, sources in _phases(data):
        shares = [0.0] * len(paths)
        for source in sources:
            number = paths.index(source.path)
            if shares[number]:
                raise ConfigError(
                    f"{source.path} stands twice in one mixture", "name it once, with the sum of the weights"
                )
            by_epochs = source.epochs is not None
            if by_epochs != (sources[0].epochs is not None):
                raise ConfigError(
                    "a mixture has weights for some sources and epochs for others",
                    "give each source the same of the two",
                )
            shares[number] = source.epochs * rows_per_epoch[number] if source.epochs is not None else source.weight
        total = math.fsum(shares)
        phases.append(Phase(first_step * rows_per_step, tuple(share / total for share in shares)))
    return Mixture(phases)


def source_paths(data: DataConfig) -> list[str]:
    """Every data set that a run reads, once, in the order in which they are named."""
    return list(dict.fromkeys(source.path for _, sources in _phases(data) for source in sources))


def too_many_epochs(name: str, epochs: float) -> str | None:
    """A warning when a source is repeated too often."""
    if epochs <= _MOST_EPOCHS:
        return None
    return f"{name} is read {epochs:.1f} times; beyond {_MOST_EPOCHS} repetitions text teaches little: lower its weight"


def _phases(data: DataConfig) -> list[tuple[int, tuple[MixSource, ...]]]:
    if data.phases:
        return [(phase.from_step, phase.sources) for phase in data.phases]
    if data.sources:
        return [(0, data.sources)]
    assert data.path is not None, "checks.check_train asks for it"
    return [(0, (MixSource(path=data.path),))]


def _counts(shares: Sequence[float], num_rows: int) -> list[int]:
    """Rows of each source among the first `num_rows` of a phase."""
    # At time t about t rows are due, half a row per source more or less: begin a little before, then take one by one
    time = num_rows - len(shares) / 2 - 1
    counts = []
    for share in shares:
        count = max(math.floor(share * time + 0.5), 0) if share else 0
        while count and _due(share, count - 1) > time:
            count -= 1
        counts.append(count)
    while sum(counts) < num_rows:
        counts[_next(shares, counts)] += 1
    return counts


def _next(shares: Sequence[float], counts: Sequence[int]) -> int:
    """The source whose next row is due first."""
    return min((s for s, share in enumerate(shares) if share), key=lambda s: (_due(shares[s], counts[s]), s))


def _due(share: float, row: int) -> float:
    return (row + 0.5) / share
