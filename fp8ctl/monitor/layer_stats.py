"""Collects quantisation statistics of every linear on chosen steps, at no cost on the others.

A linear has an attribute `stats_sink`: None, or a callable that gets (role, statistics) whenever a tensor is quantised or,
in BF16, would have been. Here sinks are set when a chosen step begins and removed when it ends. One rank records, from its own
micro-batches: the weights are everyone's, and activations and gradients of one rank are a fair sample.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fp8ctl.monitor.layer_table import LayerRow, LayerTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NUMBERS = LayerRow._fields[4:]


class _Linear(Protocol):
    precision: Any
    stats_sink: Any


class LayerStats:
    """Writes layers.parquet from linears that report their statistics.

    Args:
        linears: (FQN, module) pairs; a module has `precision` and `stats_sink`. What it hands to the sink is a mapping
            or an object with amax, underflow_share, saturation_share and sqnr_db, each a float or a one-element tensor.
            Tensors stay on their device until the step ends, and come to the host together.
        path: the table's folder, or None on ranks that don't record.
        every_steps: steps between two recordings; the first step is recorded.
    """

    def __init__(self, linears: Iterable[tuple[str, Any]], path: Path | None, *, every_steps: int) -> None:
        self._linears: list[tuple[str, _Linear]] = list(linears) if path else []
        self._table = LayerTable(path) if path else None
        self._every_steps = every_steps
        self._step: int | None = None
        self._seen: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
        self._has_warned = False

    def begin_step(self, step: int) -> None:
        """Before the first forward pass of a step; the first step is recorded, then every `every_steps`-th."""
        if (step - 1) % self._every_steps or not self._linears:
            return
        self._step, self._seen = step, {}
        for fqn, linear in self._linears:
            linear.stats_sink = functools.partial(self._receive, fqn)

    def end_step(self) -> None:
        """After the last backward pass of a step: reduces over micro-batches and hands the rows to the table.

        amax is the largest of all micro-batches, shares are means, SQNR is the mean of noise over signal, in dB.
        """
        if self._step is None:
            return
        step, self._step = self._step, None
        precision = {fqn: linear.precision for fqn, linear in self._linears}
        for _, linear in self._linears:
            linear.stats_sink = None
        units = list(self._seen)
        numbers = _to_host([values for unit in units for values in self._seen[unit]])
        rows, start = [], 0
        for fqn, role in units:
            end = start + len(self._seen[fqn, role])
            rows.append(LayerRow(step, fqn, role, precision[fqn], *reduce_microbatches(numbers[start:end])))
            start = end
        self._seen = {}
        self._guarded("append", rows)

    def flush(self) -> None:
        """Writes what waits, so that the table is as new as a checkpoint made now."""
        self._guarded("flush")

    def close(self) -> None:
        """Writes what waits; statistics of a step that did not end are dropped, its sinks removed."""
        self._step, self._seen = None, {}
        for _, linear in self._linears:
            linear.stats_sink = None
        self._guarded("flush")

    def _receive(self, fqn: str, role: str, stats: Any) -> None:
        get = stats.__getitem__ if isinstance(stats, Mapping) else functools.partial(getattr, stats)
        self._seen.setdefault((fqn, role), []).append(tuple(get(name) for name in _NUMBERS))

    def _guarded(self, what: str, *arguments: Any) -> None:
        if self._table is None:
            return
        try:
            getattr(self._table, what)(*arguments)
        except OSError as error:  # statistics are no reason to lose a run, nor to leave other ranks waiting
            if not self._has_warned:
                self._has_warned = True
                print(f"warning: can't write layers.parquet: {error}; the run goes on", file=sys.stderr, flush=True)


def reduce_microbatches(numbers_M4: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """(amax, underflow share, saturation share, SQNR) of M micro-batches together; NaN anywhere stays NaN.

    SQNR is averaged as noise power over signal power, what one measurement over all micro-batches would give were their
    signals equally strong: so a micro-batch without any loss (inf dB) counts, and one bad one is not averaged away.
    """
    import numpy as np

    amax, underflow, saturation, sqnr_db = np.asarray(numbers_M4, dtype=np.float64).T
    noise = np.mean(np.power(10.0, -sqnr_db / 10))
    with np.errstate(divide="ignore"):
        together_db = -10 * np.log10(noise)
    return float(np.max(amax)), float(np.mean(underflow)), float(np.mean(saturation)), float(together_db)


def _to_host(rows_R4: Sequence[Sequence[Any]]) -> NDArray[np.float64]:
    """Floats and one-element tensors as one array [R, 4], with one transfer for each device and dtype among them."""
    import numpy as np

    out = np.empty((len(rows_R4), len(_NUMBERS)))
    tensors: dict[tuple[Any, Any], list[tuple[int, int, Any]]] = {}
    for r, row in enumerate(rows_R4):
        for c, value in enumerate(row):
            if isinstance(value, (int, float)):
                out[r, c] = value
            else:
                tensors.setdefault((value.device, value.dtype), []).append((r, c, value))
    for group in tensors.values():
        import torch

        stacked = torch.stack([value.detach().reshape(()) for _, _, value in group]).double().cpu().numpy()
        r_at, c_at = np.array([(r, c) for r, c, _ in group]).T
        out[r_at, c_at] = stacked
    return out
