import math

import pytest

from fp8ctl.monitor.health import Level, heat_map, level, worst
from fp8ctl.monitor.layer_table import LayerRow


def row(
    fqn: str = "model.layers.0.mlp.up_proj", role: str = "input", sqnr: float = 31.0, **other: float | str
) -> LayerRow:
    values = {"precision": "fp8", "amax": 1.0, "underflow_share": 0.0, "saturation_share": 0.0} | other
    return LayerRow(step=10, fqn=fqn, role=role, sqnr_db=sqnr, **values)


@pytest.mark.parametrize(
    ("sqnr", "underflow", "amax", "expected"),
    [
        (31.0, 0.0, 1.0, Level.GOOD),
        (28.0, 0.049, 1.0, Level.GOOD),
        (math.inf, 0.0, 0.0, Level.GOOD),
        (27.9, 0.0, 1.0, Level.FAIR),
        (31.0, 0.05, 1.0, Level.FAIR),
        (21.9, 0.0, 1.0, Level.POOR),
        (31.0, 0.2, 1.0, Level.POOR),
        (27.0, 0.2, 1.0, Level.POOR),
        (11.9, 0.0, 1.0, Level.BAD),
        (-math.inf, 0.0, 1.0, Level.BAD),
        (31.0, 0.5, 1.0, Level.BAD),
        (math.nan, 0.0, 1.0, Level.BROKEN),
        (31.0, 0.0, math.inf, Level.BROKEN),
        (31.0, 0.0, math.nan, Level.BROKEN),
    ],
)
def test_levels(sqnr: float, underflow: float, amax: float, expected: Level) -> None:
    assert level(row(sqnr=sqnr, underflow_share=underflow, amax=amax)) == expected


def test_linears_are_placed_by_block_and_name() -> None:
    rows = [
        row("model.layers.0.self_attn.q_proj"),
        row("model.layers.0.self_attn.q_proj", "weight", sqnr=25.0),
        row("model.layers.1.mlp.down_proj", "grad_output", sqnr=15.0, precision="bf16"),
        row("lm_head"),
    ]
    heat = heat_map(rows)
    assert heat.kinds == ("q", "down", "lm_head") and heat.blocks == ("0", "1", "-")
    assert heat.cells == {
        ("0", "q"): {"input": Level.GOOD, "weight": Level.FAIR},
        ("1", "down"): {"grad_output": Level.POOR},
        ("-", "lm_head"): {"input": Level.GOOD},
    }
    assert heat.bf16 == {("1", "down")}


def test_many_blocks_share_rows_and_the_worst_shows() -> None:
    rows = [row(f"model.layers.{i}.mlp.up_proj", sqnr=11.0 if i == 50 else 31.0) for i in range(80)]
    heat = heat_map(rows, max_blocks=32)
    assert len(heat.blocks) == 27 and heat.blocks[0] == "0-2" and heat.blocks[-1] == "78-79"
    assert [block for (block, _), cell in heat.cells.items() if cell["input"] == Level.BAD] == ["48-50"]


def test_worst_first() -> None:
    rows = [row("a"), row("b", sqnr=math.nan), row("c", sqnr=15.0), row("d", underflow_share=0.6), row("e", sqnr=29.0)]
    assert [r.fqn for r in worst(rows, 4)] == ["b", "d", "c", "e"]
