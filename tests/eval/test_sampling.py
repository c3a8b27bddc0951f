"""Sampling against exact distributions; streams are each answer's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8ctl.eval import sampling as module
from fp8ctl.eval.sampling import Sampling, choose, stream


def frequencies(logits_V: torch.Tensor, sampling: Sampling, count: int = 20_000) -> torch.Tensor:
    """Share of each token when the uniform numbers are an even grid: the exact distribution up to 1/count."""
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ids = choose(logits_V.expand(count, -1), grid, sampling)
    return torch.bincount(ids, minlength=logits_V.numel()) / count


def test_stream_depends_on_all_that_names_the_answer_and_on_nothing_else() -> None:
    base = stream(1, "gcd", 2, 3, 8)
    np.testing.assert_array_equal(base, stream(1, "gcd", 2, 3, 20)[:8])
    for other in [(2, "gcd", 2, 3), (1, "lcm", 2, 3), (1, "gcd", 3, 3), (1, "gcd", 2, 4), (1, "gcd", 23, 0)]:
        assert not np.isin(stream(*other, 8), base).any()
    assert base.min() >= 0.0 and base.max() < 1.0


def test_stream_is_pinned() -> None:
    # stored completions can be reproduced only as long as this never changes
    pinned = [0.11043857985817407, 0.4377598105690259, 0.055770253824585114]
    assert stream(1236, "gcd", 0, 0, 3).tolist() == pinned


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 2.0]], dtype=torch.bfloat16)
    assert choose(logits, None, Sampling()).tolist() == [1, 0]


def test_temperature_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1])
    found = frequencies(logits, Sampling(temperature=0.7))
    torch.testing.assert_close(found, torch.softmax(logits / 0.7, -1), atol=2e-4, rtol=0)


@pytest.mark.parametrize("guess", [1, 2, 256])
def test_nucleus_is_the_smallest_set_with_the_mass(monkeypatch: pytest.MonkeyPatch, guess: int) -> None:
    monkeypatch.setattr(module, "_NUCLEUS_GUESS", guess)
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    # 0.5 + 0.3 = 0.8 reaches 0.7 with two tokens and 0.85 with three
    torch.testing.assert_close(
        frequencies(logits, Sampling(1.0, 0.7)), torch.tensor([0, 0.625, 0, 0.375]), atol=2e-4, rtol=0
    )
    torch.testing.assert_close(
        frequencies(logits, Sampling(1.0, 0.85)), torch.tensor([0, 0.5, 0.15, 0.3]) / 0.95, atol=2e-4, rtol=0
    )
    assert frequencies(logits, Sampling(1.0, 0.01)).tolist() == [0, 1, 0, 0]


def test_flat_distribution_needs_more_than_the_first_guess() -> None:
    found = frequencies(torch.zeros(1000), Sampling(1.0, 0.9495), count=4000)
    assert int((found > 0).sum()) == 950


@pytest.mark.parametrize("sampling", [Sampling(1.0, 1.0), Sampling(0.8, 0.9), Sampling(0.0)])
def test_choice_of_an_answer_ignores_the_rest_of_the_batch(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(7, 500, generator=generator), torch.rand(7, generator=generator, dtype=torch.float64)
    together = choose(logits, uniform, sampling)
    alone = torch.cat([choose(logits[i : i + 1], uniform[i : i + 1], sampling) for i in range(7)])
    assert together.tolist() == alone.tolist()


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_ends_of_the_unit_interval_never_give_an_impossible_token(top_p: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, -torch.inf]]).expand(2, -1)
    uniform = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert choose(logits, uniform, Sampling(1.0, top_p)).tolist() == [1, 2]
