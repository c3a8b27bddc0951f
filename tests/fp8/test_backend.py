from __future__ import annotations

import pytest

from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.backend import choose_backend


def test_auto_says_what_it_chose_and_why() -> None:
    assert choose_backend("auto").name == "reference"
    assert choose_backend("auto").reason.startswith("auto: the only backend")
    assert choose_backend("reference").reason.startswith("asked for")


def test_an_unknown_backend_is_an_error_and_no_downgrade() -> None:
    with pytest.raises(PrecisionError, match="unknown FP8 backend 'te'") as e:
        choose_backend("te")
    assert e.value.hint == "use precision.backend=auto or precision.backend=reference"
