"""Generation against a plain loop without cache, and its independence of batch size and order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch

from fp8ctl.config.schema import ModelShape
from fp8ctl.errors import ModelError
from fp8ctl.eval import generate as module
from fp8ctl.eval.completions import Key
from fp8ctl.eval.generate import Generated, Protocol, Request, generate, shared_tokens
from fp8ctl.eval.sampling import Sampling, choose, stream
from fp8ctl.model.kv_cache import KVCache
from fp8ctl.model.transformer import Transformer

SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=48,
    ffn_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_size=12,
    vocab_size=61,
    max_positions=64,
    init_std=0.3,  # wide enough that logits differ and answers end at different lengths
)
STOP = frozenset({3, 17, 40})
GREEDY = Protocol(Sampling(), seed=5, stop_ids=STOP, max_new_tokens=20)
SAMPLED = Protocol(Sampling(temperature=1.3, top_p=0.9), seed=5, stop_ids=STOP, max_new_tokens=20)


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(3)
    return Transformer(SHAPE).eval()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    lengths = [9, 3, 30, 1, 12, 12, 7, 25, 2, 18, 5]
    prompts = [tuple(torch.randint(SHAPE.vocab_size, (n,), generator=generator).tolist()) for n in lengths]
    return [Request(Key("gcd", i, s), prompt) for i, prompt in enumerate(prompts) for s in range(2)]


def by_key(answers: Iterable[Generated]) -> dict[Key, tuple[tuple[int, ...], int, str]]:
    found = {a.request.key: (a.token_ids, a.num_tokens, a.finish_reason) for a in answers}
    return dict(sorted(found.items()))


@torch.inference_mode()
def plainly(model: Transformer, request: Request, protocol: Protocol) -> tuple[tuple[int, ...], int, str]:
    """One answer, the whole sequence computed again for every token."""
    ids = list(request.prompt_ids)
    uniform = torch.from_numpy(stream(protocol.seed, *dataclasses.astuple(request.key), count=protocol.max_new_tokens))
    for count in range(1, protocol.max_new_tokens + 1):
        n = len(ids)
        hidden = model(torch.tensor(ids), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), n)
        token = int(choose(model.logits(hidden[-1:]), uniform[count - 1 : count], protocol.sampling))
        if token in protocol.stop_ids:
            return tuple(ids[len(request.prompt_ids) :]), count, "stop"
        ids.append(token)
    return tuple(ids[len(request.prompt_ids) :]), protocol.max_new_tokens, "length"


@pytest.mark.parametrize("protocol", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_equals_generation_without_cache(model: Transformer, requests: list[Request], protocol: Protocol) -> None:
    expected = dict(sorted((r.key, plainly(model, r, protocol)) for r in requests))
    assert {reason for _, _, reason in expected.values()} == {"stop", "length"}, "the test wants both ends"
    for batch_size in (1, 5, 64):
        assert by_key(generate(model, requests, protocol, batch_size=batch_size)) == expected


@pytest.mark.parametrize("protocol", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_order_and_subset_of_requests_change_nothing(
    model: Transformer, requests: list[Request], protocol: Protocol
) -> None:
    everything = by_key(generate(model, requests, protocol, batch_size=4))
    half = by_key(generate(model, requests[::-2], protocol, batch_size=3))
    assert len(half) == len(requests) // 2 and half.items() <= everything.items()


def test_prompts_that_exceed_one_pass_are_split(
    model: Transformer, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_key(generate(model, requests, GREEDY, batch_size=8))
    monkeypatch.setattr(module, "_PREFILL_TOKENS", 20)
    assert by_key(generate(model, requests, GREEDY, batch_size=8)) == expected


@pytest.mark.parametrize("protocol", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_shared_beginning_is_computed_once_and_changes_nothing(
    model: Transformer, requests: list[Request], protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = (5, 9, 9, 41, 8, 2, 30)
    longer = [Request(r.key, system + r.prompt_ids) for r in requests]
    assert shared_tokens([r.prompt_ids for r in longer]) == len(system)
    expected = by_key(generate(model, longer, protocol, batch_size=5))
    computed = []
    extend = Transformer.extend

    def counting(self: Transformer, cache: KVCache, tokens: list[list[int]], starts: list[int]) -> torch.Tensor:
        computed.append(sum(map(len, tokens)))
        return extend(self, cache, tokens, starts)

    monkeypatch.setattr(Transformer, "extend", counting)
    sharing = dataclasses.replace(protocol, shared_tokens=len(system))
    assert by_key(generate(model, longer, sharing, batch_size=64)) == expected
    assert computed[:2] == [len(system), sum(len(r.prompt_ids) for r in requests)]


def test_shared_tokens_leave_each_prompt_at_least_one() -> None:
    assert shared_tokens([(1, 2, 3), (1, 2, 4), (1, 2)]) == 1
    assert shared_tokens([(1, 2, 3)]) == 2
    assert shared_tokens([(1, 2), (1, 2)]) == 1
    assert shared_tokens([(7,), (1, 2)]) == 0
    assert shared_tokens([(1, 5, 3), (1, 4, 3), (1, 5, 2)]) == 1


def test_samples_of_one_question_differ_and_greedy_ones_do_not(model: Transformer, requests: list[Request]) -> None:
    sampled = by_key(generate(model, requests, SAMPLED, batch_size=8))
    greedy = by_key(generate(model, requests, GREEDY, batch_size=8))
    indices = {key.index for key in greedy}
    assert all(greedy[Key("gcd", i, 0)] == greedy[Key("gcd", i, 1)] for i in indices)
    assert sum(sampled[Key("gcd", i, 0)] != sampled[Key("gcd", i, 1)] for i in indices) > len(indices) // 2


def test_tokens_are_reported_and_slots_stay_full(model: Transformer, requests: list[Request]) -> None:
    protocol = Protocol(Sampling(), seed=0, stop_ids=frozenset(), max_new_tokens=6)
    counts: list[int] = []
    answers = list(generate(model, requests, protocol, batch_size=5, on_tokens=counts.append))
    assert sum(counts) == sum(a.num_tokens for a in answers) == 6 * len(requests)
    # 22 answers in 5 slots: 4 full rounds and one of 2, each of one prefill and 5 decoding steps
    assert counts == ([5] * 6) * 4 + [2] * 6


def test_consumer_is_not_in_inference_mode(model: Transformer, requests: list[Request]) -> None:
    for _ in generate(model, requests[:2], GREEDY, batch_size=2):
        assert not torch.is_inference_mode_enabled()


def test_budget_of_one_token(model: Transformer, requests: list[Request]) -> None:
    protocol = Protocol(Sampling(), seed=0, stop_ids=frozenset(), max_new_tokens=1)
    answers = list(generate(model, requests, protocol, batch_size=3))
    assert {(len(a.token_ids), a.finish_reason) for a in answers} == {(1, "length")}


def test_longest_prompt_and_answer_that_fit_and_one_token_more(model: Transformer) -> None:
    protocol = Protocol(Sampling(), seed=0, stop_ids=frozenset(), max_new_tokens=5)
    fits = Request(Key("gcd", 0, 0), tuple([7] * 60))
    assert len(next(generate(model, [fits], protocol, batch_size=1)).token_ids) == 5
    too_long = Request(Key("gcd", 0, 0), tuple([7] * 61))
    with pytest.raises(ModelError, match="sequences of 65 tokens are longer than the model's 64 positions"):
        next(generate(model, [too_long], protocol, batch_size=1))


def test_broken_weights_are_named_not_sampled_from(requests: list[Request]) -> None:
    torch.manual_seed(3)
    broken = Transformer(SHAPE).eval()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    for protocol in (GREEDY, SAMPLED):
        with pytest.raises(ModelError, match=r"logits are not finite \(question 2 of gcd\)") as caught:
            list(generate(broken, requests, protocol, batch_size=2))
        assert "dtype=fp32" in (caught.value.hint or "")


def test_no_requests_no_answers(model: Transformer) -> None:
    assert list(generate(model, [], GREEDY, batch_size=4)) == []
