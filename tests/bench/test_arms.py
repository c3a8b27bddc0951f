"""Arms by name."""

from __future__ import annotations

import pytest

from fp8ctl.bench.arms import PEERS, read_arms
from fp8ctl.errors import ConfigError


def test_names_of_precisions_and_peers() -> None:
    bf16, infir2, row, peer = read_arms(["bf16", "infir2", "row", "te-block"])
    assert bf16.settings is not None and bf16.settings.precision.default == "bf16"
    assert infir2.settings is not None and infir2.settings.precision.recipe.name == "infir2"
    assert row.settings is not None and row.settings.precision.recipe.granularity == "row"
    assert peer.settings is None
    assert all(plan.settings is None for plan in read_arms(list(PEERS)))


def test_ones_own() -> None:
    text = "slow one: precision=infir2 precision.backend=reference precision.recipe.wgrad=bf16 compile=off loss_chunk_tokens=64"
    (plan,) = read_arms([text])
    assert plan.name == "slow one" and plan.settings is not None
    assert plan.settings.precision.backend == "reference"
    assert (plan.settings.precision.recipe.wgrad, plan.settings.compile) == ("bf16", "off")
    assert plan.settings.loss_chunk_tokens == 64


@pytest.mark.parametrize(
    ("texts", "message", "hint"),
    [
        (["infer2"], "arms: no arm named 'infer2'", "did you mean infir2?"),
        (["te-blok"], "arms: no arm named 'te-blok'", "did you mean te-block?"),
        (["zzz"], "arms: no arm named 'zzz'", "arms can be bf16, infir2"),
        (["bf16", "bf16"], "arms: bf16 is given twice", "give each arm a name of its own"),
        ([], "arms: no arms", "set arms=[bf16,infir2]"),
        (["a: precision=fp9"], "arms: a: precision: no choice named 'fp9'", "precision can be bf16"),
        (["a: precision.bakend=te"], "arms: a: precision.bakend: unknown setting", "did you mean precision.backend?"),
    ],
)
def test_mistakes(texts: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_arms(texts)
    assert caught.value.message.startswith(message)
    assert hint in (caught.value.hint or "")


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError, match="2 problems") as caught:
        read_arms(["infer2", "hff"])
    assert caught.value.hint == "did you mean infir2?; did you mean hf?"
