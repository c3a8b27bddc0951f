import pytest
import torch

from fp8ctl.errors import ModelError
from fp8ctl.model import attention_choice
from fp8ctl.model.attention_choice import choose_attention, try_attention

HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_size": 64}


@pytest.fixture
def on_gpu(monkeypatch):
    """A GPU of the given generation on which the named kernels fail."""

    def pretend(*broken, major=9):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))
        monkeypatch.setattr(
            attention_choice, "try_attention", lambda kind, *_: "no such kernel" if kind in broken else None
        )
        return {**HEADS, "device": "cuda"}

    return pretend


def test_a_cpu_has_one_way():
    choice = choose_attention("auto", device="cpu", **HEADS)
    assert choice.name == "any"
    assert choice.reason == "on cpu each document by itself, by PyTorch's own choice"
    with pytest.raises(ModelError, match="no cudnn attention on cpu") as e:
        choose_attention("cudnn", device="cpu", **HEADS)
    assert e.value.hint == "use engine.attention=auto"


def test_fp32_has_one_way_too():
    assert "in float32" in choose_attention("auto", device="cuda", dtype=torch.float32, **HEADS).reason
    with pytest.raises(ModelError, match="no flash attention in float32"):
        choose_attention("flash", device="cuda", dtype=torch.float32, **HEADS)


def test_auto_on_hopper_is_cudnn_for_full_rows(on_gpu):
    choice = choose_attention("auto", **on_gpu())
    assert choice.name == "cudnn+flash"
    assert "fastest on Hopper" in choice.reason


def test_auto_elsewhere_is_flash(on_gpu):
    assert choose_attention("auto", **on_gpu(major=8)).name == "flash"
    assert choose_attention("auto", **on_gpu(major=10)).name == "flash"


def test_auto_tells_what_did_not_run(on_gpu):
    choice = choose_attention("auto", **on_gpu("cudnn+flash"))
    assert choice.name == "flash"
    assert choice.reason == "FlashAttention for all documents: it runs here; cudnn+flash does not run: no such kernel"


def test_auto_takes_no_slow_way_by_itself(on_gpu):
    with pytest.raises(ModelError) as e:
        choose_attention("auto", **on_gpu("cudnn+flash", "flash"))
    assert e.value.message == (
        "no fast attention for 6 query heads on 2 key/value heads of size 64: "
        "cudnn+flash does not run: no such kernel; flash does not run: no such kernel"
    )
    assert e.value.hint == "engine.attention=any takes PyTorch's slower kernels"


@pytest.mark.parametrize("asked", ["cudnn", "flash"])
def test_what_is_asked_for_runs_or_is_an_error(on_gpu, asked):
    assert choose_attention(asked, **on_gpu()).name == asked
    with pytest.raises(ModelError, match=f"{asked} does not run: no such kernel") as e:
        choose_attention(asked, **on_gpu(asked))
    assert e.value.hint == "use engine.attention=auto"


def test_the_price_of_planning_is_told(on_gpu):
    assert choose_attention("cudnn", **on_gpu()).reason == "asked for: cuDNN, and only rows full of equal documents"


def test_any_is_taken_at_its_word(on_gpu):
    assert choose_attention("any", **on_gpu("cudnn", "flash")).name == "any"


def test_the_trial_compares_values_and_gradients(monkeypatch):
    """On a CPU, where attention has one way: right as it is, noticed when wrong, and a refusal is told in words."""
    trial = ((6, 2, 64), torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    assert try_attention("any", *trial) is None
    real = attention_choice.attention

    def wrong(q, k, v, documents):
        return real(q, k, v * (1.1 if q.dtype == torch.bfloat16 else 1.0), documents)

    monkeypatch.setattr(attention_choice, "attention", wrong)
    assert "it is wrong by" in try_attention("any", *trial)

    def refused(*_):
        import warnings

        warnings.warn("head size is too odd (Triggered internally at x.cpp:1)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(attention_choice, "attention", refused)
    assert try_attention("any", *trial) == "No available kernel. Aborting execution. head size is too odd"
