"""Calls Triton kernels with little work on the host.

`kernel[grid](...)` looks at every argument of every call to find the compiled form that fits, some 30 microseconds, which is longer than
many of these kernels run. But what that returns, a compiled kernel, can be called as well, and it fits all arguments of a kind:
the same dtypes and alignments of tensors, integers that are multiples of 16 or not. So the forms are kept here by just that.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

_ALIGNMENT = 16
_INT32_MAX = 2**31 - 1
_compiled: dict[tuple[object, ...], Any] = {}


def launch(kernel: Any, num_programs: int, *args: Tensor | int, constants: dict[str, Any], **options: Any) -> None:
    """Runs `kernel` with its arguments in order; then come its constants, in the order in which it declares them. `options`:
    num_warps, maxnreg.
    """
    first = args[0]
    assert isinstance(first, Tensor)
    kinds = tuple(
        (a == 1, a % _ALIGNMENT == 0, a > _INT32_MAX)
        if isinstance(a, int)
        else (a.dtype, a.data_ptr() % _ALIGNMENT == 0)
        for a in args
    )
    values = tuple(constants.values())
    key = (kernel, first.device.index, kinds, values, *options.values())
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(num_programs, 1, 1)](*args, *values)
        return
    compiled = kernel[(num_programs,)](*args, **constants, **options)
    if not triton.knobs.runtime.interpret:
        _compiled[key] = compiled
