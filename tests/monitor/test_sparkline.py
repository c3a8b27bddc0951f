import io
import math

from rich.console import Console

from fp8ctl.monitor.sparkline import Sparkline, bucket_peaks

RAMP = "01234567"


def test_heights_span_the_ramp() -> None:
    assert Sparkline([0, 1, 2, 3, 4, 5, 6, 7]).text(80, RAMP) == "01234567"
    assert Sparkline([7, 0]).text(80, RAMP) == "70"
    assert Sparkline([5, 5, 5]).text(80, RAMP) == "000"
    assert Sparkline([]).text(80, RAMP) == ""


def test_it_is_never_wider_than_asked_and_keeps_every_spike() -> None:
    values = [1.0] * 1000
    values[123] = 9.0
    text = Sparkline(values).text(40, RAMP)
    assert len(text) == 40 and text == "0" * 4 + "7" + "0" * 35
    assert bucket_peaks([1, 5, 2, 3, 4], 2) == [5, 4]


def test_a_giant_does_not_flatten_the_rest() -> None:
    values = [float(i % 8) for i in range(100)]
    values[50] = 1e9
    assert Sparkline(values).text(100, RAMP) == "01234567" * 6 + "01" + "7" + "34567" + "01234567" * 5 + "0123"


def test_values_that_are_not_finite_are_marked() -> None:
    assert Sparkline([0, math.nan, 7]).text(80, RAMP) == "0!7"
    assert Sparkline([0.0, 1.0, math.inf, 7.0]).text(2, RAMP) == "0!"
    assert Sparkline([math.nan, math.inf]).text(80, RAMP) == "!!"


def test_logarithmic_heights() -> None:
    assert Sparkline([1, 10, 100, 1000], is_log=True).text(80, RAMP) == "0257"
    assert Sparkline([0, 1e-30, 1], is_log=True).text(80, RAMP) == "007"


def test_plain_characters_where_the_encoding_has_no_blocks() -> None:
    for encoding, expected in (("ascii", "_#"), ("utf-8", "\u2581\u2588")):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        Console(file=file, width=20).print(Sparkline([0, 1]))
        file.seek(0)
        assert file.read() == expected + "\n"
