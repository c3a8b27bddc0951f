import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.monitor.layer_stats import LayerStats, reduce_microbatches
from fp8ctl.monitor.layer_table import read_layers


def numbers(amax: Any, sqnr_db: Any = 30.0) -> dict[str, Any]:
    return {"amax": amax, "underflow_share": 0.25, "saturation_share": 0.0, "sqnr_db": sqnr_db}


def layer() -> SimpleNamespace:
    return SimpleNamespace(precision="fp8", stats_sink=None)


def test_micro_batches_are_reduced_by_definition() -> None:
    amax, underflow, saturation, sqnr = reduce_microbatches(
        np.array([[2.0, 0.1, 0.0, 30.0], [8.0, 0.3, 0.5, 20.0], [4.0, 0.2, 0.1, math.inf]])
    )
    assert (amax, underflow, saturation) == pytest.approx((8.0, 0.2, 0.2))
    assert sqnr == pytest.approx(-10 * math.log10((1e-3 + 1e-2 + 0) / 3))
    lossless = reduce_microbatches(np.array([[1.0, 0.0, 0.0, math.inf]] * 2))
    assert lossless == (1.0, 0.0, 0.0, math.inf)
    broken = reduce_microbatches(np.array([[1.0, 0.0, 0.0, 30.0], [math.nan, 0.0, 0.0, math.nan]]))
    assert math.isnan(broken[0]) and math.isnan(broken[3])


def test_only_chosen_steps_set_sinks(tmp_path: Path) -> None:
    one = layer()
    stats = LayerStats([("a", one)], tmp_path / "t", every_steps=3)
    for step in range(1, 8):
        stats.begin_step(step)
        assert (one.stats_sink is not None) == (step in (1, 4, 7))
        if one.stats_sink:
            one.stats_sink("input", numbers(float(step)))
        stats.end_step()
        assert one.stats_sink is None
    stats.close()
    assert [(r["step"], r["amax"]) for r in read_layers(tmp_path / "t").to_pylist()] == [(1, 1.0), (4, 4.0), (7, 7.0)]


def test_tensors_floats_and_objects_are_taken_alike(tmp_path: Path) -> None:
    one, two = layer(), layer()
    two.precision = "bf16"
    stats = LayerStats([("a", one), ("b", two)], tmp_path / "t", every_steps=1)
    stats.begin_step(1)
    one.stats_sink("input", numbers(torch.tensor(4.0), torch.tensor(20.0, dtype=torch.float64)))
    two.stats_sink("weight", SimpleNamespace(**numbers(1.0)))
    one.stats_sink("input", numbers(torch.tensor([9.0], requires_grad=True), 20.0))
    stats.end_step()
    stats.flush()
    first, second = read_layers(tmp_path / "t").to_pylist()
    assert (first["fqn"], first["role"], first["precision"], first["amax"]) == ("a", "input", "fp8", 9.0)
    assert first["sqnr_db"] == pytest.approx(20.0) and first["underflow_share"] == 0.25
    assert (second["fqn"], second["role"], second["precision"], second["amax"]) == ("b", "weight", "bf16", 1.0)


def test_real_linears_in_both_precisions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        Fp8Linear(192, 128, precision="fp8"), torch.nn.SiLU(), Fp8Linear(128, 64, precision="bf16")
    )
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    stats = LayerStats(linears, tmp_path / "t", every_steps=2)
    inputs = [torch.randn(64, 192) for _ in range(6)]
    for step in (1, 2):
        stats.begin_step(step)
        for x in inputs[3 * (step - 1) : 3 * step]:
            model(x).square().sum().backward()
        stats.end_step()
    stats.close()
    rows = {(r["fqn"], r["role"]): r for r in read_layers(tmp_path / "t").to_pylist()}
    assert set(rows) == {(n, role) for n in ("0", "2") for role in ("input", "weight", "grad_output")}
    assert {r["step"] for r in rows.values()} == {1}
    assert rows["0", "input"]["amax"] == max(x.abs().max().item() for x in inputs[:3])
    assert rows["0", "weight"]["amax"] == pytest.approx(model[0].weight.abs().max().item())
    assert (rows["0", "input"]["precision"], rows["2", "input"]["precision"]) == ("fp8", "bf16")
    for row in rows.values():  # E4M3 keeps 3 mantissa bits: about 31 dB on anything well scaled
        assert 28 < row["sqnr_db"] < 36 and 0 <= row["underflow_share"] < 0.01


def test_other_ranks_and_runs_without_linears_record_nothing(tmp_path: Path) -> None:
    one = layer()
    for stats in (LayerStats([("a", one)], None, every_steps=1), LayerStats([], tmp_path / "t", every_steps=1)):
        stats.begin_step(1)
        assert one.stats_sink is None
        stats.end_step()
        stats.flush()
        stats.close()
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_broke_off_leaves_no_sinks_and_no_rows(tmp_path: Path) -> None:
    one = layer()
    stats = LayerStats([("a", one)], tmp_path / "t", every_steps=1)
    stats.begin_step(1)
    one.stats_sink("input", numbers(1.0))
    stats.end_step()
    stats.begin_step(2)
    one.stats_sink("input", numbers(2.0))
    stats.close()
    assert one.stats_sink is None
    assert read_layers(tmp_path / "t")["step"].to_pylist() == [1]


def test_a_step_without_any_report_writes_nothing(tmp_path: Path) -> None:
    stats = LayerStats([("a", layer())], tmp_path / "t", every_steps=1)
    stats.begin_step(1)
    stats.end_step()
    stats.close()
    assert read_layers(tmp_path / "t").num_rows == 0


def test_a_disk_that_refuses_costs_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text("a file where the folder should be")
    one = layer()
    stats = LayerStats([("a", one)], tmp_path / "t", every_steps=1)
    for step in (1, 2):
        stats.begin_step(step)
        one.stats_sink("input", numbers(1.0))
        stats.end_step()
        stats.flush()
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("warning: can't write layers.parquet: ") and warning.endswith("; the run goes on")
