"""The kernel in Triton's interpreter (TRITON_INTERPRET=1); on a GPU: tests/gpu/test_loss_gpu.py."""

import importlib.util
import os

import pytest
import torch

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.model.loss import softmax_loss_

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton and TRITON_INTERPRET=1",
)


@pytest.mark.parametrize("vocabulary", [5, 128, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_plain_pytorch(vocabulary, dtype):
    from fp8ctl.model import loss_kernels

    torch.manual_seed(0)
    logits = (4 * torch.randn(6, vocabulary)).to(dtype)
    labels = torch.tensor([0, vocabulary - 1, IGNORE_INDEX, 3, vocabulary, 1])
    logits[2], logits[3, 1], logits[5, 0] = float("nan"), float("-inf"), float("inf")
    plain, quiet = logits[:4].clone(), logits.clone()
    expected = softmax_loss_(plain, labels[:4], write_gradient=True)
    assert torch.allclose(loss_kernels.softmax_loss_(quiet, labels, write_gradient=False)[:4], expected, rtol=1e-5)
    assert torch.equal(quiet[[0, 1, 3, 4]], logits[[0, 1, 3, 4]])
    losses = loss_kernels.softmax_loss_(logits, labels, write_gradient=True)
    assert torch.allclose(losses[:4], expected, rtol=1e-5)
    assert losses[4:].isnan().all(), "a label outside, and an infinite logit"
    # the interpreter rounds to BF16 towards zero
    assert torch.allclose(logits[:4].float(), plain.float(), atol=1e-6 if dtype == torch.float32 else 8e-3)
    assert logits[2].count_nonzero() == 0
