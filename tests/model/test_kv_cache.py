import pytest
import torch

from fp8ctl.errors import ModelError
from fp8ctl.model.hf import load_hf
from fp8ctl.model.kv_cache import KVCache

PROMPTS = [[5, 9, 2, 44, 17, 8, 1], [3], [7, 7, 60, 21], list(range(1, 24))]
NEW = 12


def new_cache(model, num_rows, max_tokens=64):
    return KVCache(
        model.shape,
        num_rows=num_rows,
        max_tokens=max_tokens,
        dtype=model.head_weight.dtype,
        device=model.head_weight.device,
    )


def greedy(model, prompts, num_new=NEW):
    """Tokens [B, num_new] and the logits of each step [num_new, B, V]."""
    cache = new_cache(model, len(prompts))
    logits = [model.extend(cache, prompts, [0] * len(prompts))]
    chosen = [logits[0].argmax(dim=1).tolist()]
    for step in range(num_new - 1):
        starts = [len(p) + step for p in prompts]
        logits.append(model.extend(cache, [[token] for token in chosen[-1]], starts))
        chosen.append(logits[-1].argmax(dim=1).tolist())
    return [list(row) for row in zip(*chosen, strict=True)], torch.stack(logits)


@torch.no_grad()
def full_logits(model, pack, tokens):
    return model.logits(model(*pack(torch.tensor(tokens))))


def test_steps_equal_the_full_forward(model, pack):
    chosen, logits = greedy(model, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        full = full_logits(model, pack, prompt + chosen[row])
        expected = full[len(prompt) - 1 : -1]
        assert (logits[:, row] - expected).abs().max() < 1e-5
        assert expected.argmax(dim=1).tolist() == chosen[row]


def test_steps_equal_the_full_forward_of_every_family(kind, hf_folder, pack):
    model = load_hf(hf_folder(kind))
    chosen, logits = greedy(model, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        expected = full_logits(model, pack, prompt + chosen[row])[len(prompt) - 1 : -1]
        assert (logits[:, row] - expected).abs().max() < 1e-4


def test_a_prompts_logits_are_those_of_the_full_forward_to_the_bit(model, pack):
    first = model.extend(new_cache(model, len(PROMPTS)), PROMPTS, [0] * len(PROMPTS))
    with torch.no_grad():
        packed = pack(*(torch.tensor(p) for p in PROMPTS))
        hidden = model(*packed)[packed[2][1:].long() - 1]
        assert torch.equal(first, model.logits(hidden))


def test_tokens_do_not_depend_on_the_batch(model):
    together, logits = greedy(model, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone, alone_logits = greedy(model, [prompt])
        assert alone[0] == together[row]
        assert (alone_logits[:, 0] - logits[:, row]).abs().max() < 1e-5
    backwards, _ = greedy(model, PROMPTS[::-1])
    assert backwards[::-1] == together


def test_several_tokens_may_follow_a_filled_row(model, pack):
    tokens = list(range(30, 50))
    cache = new_cache(model, 2)
    model.extend(cache, [tokens[:6], [1, 2]], [0, 0])
    logits = model.extend(cache, [tokens[6:13], [3]], [6, 2])
    assert torch.allclose(logits[0], full_logits(model, pack, tokens[:13])[-1], atol=1e-5)
    assert torch.allclose(logits[1], full_logits(model, pack, [1, 2, 3])[-1], atol=1e-5)
    logits = model.extend(cache, [tokens[13:14], [4]], [13, 3])
    assert torch.allclose(logits[0], full_logits(model, pack, tokens[:14])[-1], atol=1e-5)


def test_finished_rows_make_room_for_new_ones(model, pack):
    cache = new_cache(model, 3)
    model.extend(cache, PROMPTS[:3], [0, 0, 0])
    cache.keep([0, 2])
    model.extend(cache.rows(2, 3), [PROMPTS[3]], [0])
    logits = model.extend(cache, [[11], [12], [13]], [len(PROMPTS[i]) for i in (0, 2, 3)])
    for row, tokens in enumerate([PROMPTS[0] + [11], PROMPTS[2] + [12], PROMPTS[3] + [13]]):
        assert torch.allclose(logits[row], full_logits(model, pack, tokens)[-1], atol=1e-5)


def test_what_a_row_held_before_leaves_no_trace(model):
    cache = new_cache(model, 1)
    model.extend(cache, [PROMPTS[3]], [0])
    used = model.extend(cache, [PROMPTS[0]], [0]), model.extend(cache, [[4]], [7])
    fresh_cache = new_cache(model, 1)
    fresh = model.extend(fresh_cache, [PROMPTS[0]], [0]), model.extend(fresh_cache, [[4]], [7])
    assert torch.equal(used[0], fresh[0])
    assert torch.equal(used[1], fresh[1])


def test_bf16_steps_are_as_near_as_bf16_allows(model, pack):
    chosen, logits = greedy(model.bfloat16(), PROMPTS)
    full = full_logits(model, pack, PROMPTS[3] + chosen[3])[len(PROMPTS[3]) - 1 : -1].float()
    assert (logits[:, 3] - full).norm() < 0.02 * full.norm()


def test_memory_is_as_documented(model):
    cache = new_cache(model, 3, max_tokens=10)
    assert cache.num_bytes == 2 * 2 * 3 * 2 * 10 * 8 * 4
    assert (cache.num_rows, cache.max_tokens) == (3, 10)


def test_longer_than_the_model_is_refused(model):
    with pytest.raises(ModelError, match="sequences of 257 tokens are longer than the model's 256 positions") as e:
        new_cache(model, 1, max_tokens=257)
    assert e.value.hint == "use shorter prompts or a smaller max_new_tokens"


@pytest.mark.parametrize(
    ("tokens", "starts", "message"),
    [
        ([[1], []], [0, 0], "a sequence without tokens can't be continued"),
        ([], [], "a sequence without tokens can't be continued"),
        ([[1], [2], [3]], [0, 0, 0], "3 sequences don't fit a cache of 2 rows"),
        ([[1], [1, 2]], [0, 15], "a sequence of 17 tokens outgrows the cache of 16"),
    ],
)
def test_what_does_not_fit_is_refused(model, tokens, starts, message):
    with pytest.raises(ModelError, match=message) as e:
        model.extend(new_cache(model, 2, max_tokens=16), tokens, starts)
    assert e.value.hint


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_steps_equal_the_full_forward(model, pack, dtype):
    model = model.cuda().to(dtype)
    chosen, logits = greedy(model, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        ids, positions, cu_seqlens, longest = pack(torch.tensor(prompt + chosen[row]))
        with torch.no_grad():
            full = model.logits(model(ids.cuda(), positions.cuda(), cu_seqlens.cuda(), longest)).float()
        expected = full[len(prompt) - 1 : -1]
        assert (logits[:, row] - expected).norm() < (1e-5 if dtype == torch.float32 else 0.03) * expected.norm()
