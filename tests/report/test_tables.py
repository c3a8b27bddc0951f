"""What runs chose stands in the table of where a report comes from."""

from __future__ import annotations

from fp8ctl.report.tables import provenance_table


def run(label: str, **environment: object) -> dict[str, object]:
    return {
        "label": label,
        "model": {"name": "m", "path": None},
        "data": "tokens",
        "seed": 1,
        "device": "cuda",
        "folder": label,
        "backend": "native",
        "environment": {"command": ["fp8ctl"], **environment},
    }


def facts(runs: list[dict[str, object]]) -> dict[tuple[str, str], str]:
    return {(str(row[0].text), str(row[1].text)): str(row[2].text) for row in provenance_table(runs).rows}


def test_kernels_that_a_run_chose_and_why() -> None:
    backend = {"name": "native", "reason": "auto: ran right", "gemm": "cublas", "gemm_reason": "scales by block here"}
    attention = {"name": "cudnn+flash", "reason": "fastest on Hopper"}
    told = facts(
        [run("A", backend=backend, attention=attention, compile="kernels"), run("B", backend={"name": "reference"})]
    )
    assert told["FP8 backend", "A"] == "native: auto: ran right" and told["FP8 backend", "B"] == "reference"
    assert told["FP8 GEMMs", "A"] == "cublas: scales by block here"
    assert told["attention", "A"] == "cudnn+flash: fastest on Hopper"
    assert told["torch.compile", "A"] == "kernels"


def test_runs_that_tell_nothing_of_it_get_no_row() -> None:
    assert not {name for name, _ in facts([run("A")])} & {"FP8 GEMMs", "attention", "torch.compile"}
