from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8ctl.data.mixing import Mixture, Phase, too_many_epochs


def walk(mixture: Mixture, num_rows: int) -> list[tuple[int, int]]:
    return [mixture.locate(row) for row in range(num_rows)]


shares = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6).map(lambda ws: tuple(w / sum(ws) for w in ws))


@given(shares, st.integers(1, 300))
def test_every_row_of_a_source_comes_once_and_in_order(of: tuple[float, ...], num_rows: int) -> None:
    mixture = Mixture([Phase(0, of)])
    seen = [0] * len(of)
    for row, (source, local) in enumerate(walk(mixture, num_rows)):
        assert mixture.counts(row) == seen
        assert local == seen[source]
        seen[source] += 1
        assert all(abs(n - share * (row + 1)) <= len(of) for n, share in zip(seen, of, strict=True))


@given(shares, st.integers(10**6, 10**9))
def test_far_rows_are_found_at_once(of: tuple[float, ...], row: int) -> None:
    mixture = Mixture([Phase(0, of)])
    before, (source, local) = mixture.counts(row), mixture.locate(row)
    assert sum(before) == row and local == before[source]
    after = mixture.counts(row + 1)
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(s == source) for s in range(len(of))]


def test_phases_keep_cursors() -> None:
    mixture = Mixture([Phase(0, (0.5, 0.5, 0.0)), Phase(10, (0.0, 0.25, 0.75)), Phase(18, (1.0, 0.0, 0.0))])
    rows = walk(mixture, 22)
    for source in range(3):
        locals_ = [local for s, local in rows if s == source]
        assert locals_ == list(range(len(locals_)))
    assert [s for s, _ in rows[18:]] == [0] * 4
    assert mixture.counts(18) == [5, 7, 6]


@pytest.mark.parametrize(("epochs", "warns"), [(1.0, False), (4.0, False), (4.1, True)])
def test_repetitions(epochs: float, warns: bool) -> None:
    assert (too_many_epochs("a", epochs) is not None) is warns
