"""From what is left of dead ranks to a cause and a next step."""

from __future__ import annotations

import json
import re
import signal

from fp8ctl.paths import RunPaths

_OUT_OF_MEMORY = "lower batch.micro_batch_rows or batch.seq_len_tokens, turn on engine.activation_checkpointing, or raise engine.zero_stage"
_BY_SIGNAL = {
    signal.SIGKILL: ("killed (signal 9), most often by the system for want of memory", _OUT_OF_MEMORY),
    signal.SIGBUS: (
        "bus error (signal 7), most often for want of shared memory",
        "make /dev/shm larger (`docker run --shm-size=8g`)",
    ),
    signal.SIGSEGV: ("crashed in native code (signal 11)", "run `fp8ctl doctor`; look for mismatched library versions"),
    signal.SIGABRT: ("aborted by a library (signal 6)", "the last lines of the rank's log say by which one"),
}


def cause_of_death(paths: RunPaths, launcher_code: int) -> tuple[str, str, int]:
    """(cause, hint, exit code) of a job that ended without saying how.

    The first rank that left an error file is the culprit: others die of its absence. Without one, the launcher's log names the
    return code of the rank that died.
    """
    reports = []
    for file in paths.logs.glob("rank-*.error.json"):
        try:
            reports.append(json.loads(file.read_text(encoding="utf-8")))
        except json.JSONDecodeError:
            continue  # killed while writing it
    if reports:
        first = min(reports, key=lambda r: r["time"])
        logs = f"see {paths.rank_log(first['rank'])}"
        return f"rank {first['rank']}: {first['message']}", first["hint"] or logs, int(first["exit_code"])

    code = _rank_code(paths, launcher_code)
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number in signal.valid_signals():
        name = signal.Signals(number).name
        cause, hint = _BY_SIGNAL.get(signal.Signals(number), (f"ended by {name}", f"see {paths.logs}"))
        return f"a rank was {cause}" if not cause.startswith("crashed") else f"a rank {cause}", hint, 1
    return f"the ranks ended with code {launcher_code} and left no status", f"see {paths.logs}", 1


def _rank_code(paths: RunPaths, launcher_code: int) -> int:
    log = paths.logs / "launcher.log"
    found = re.findall(r"exits with return code = (-?\d+)", log.read_text(errors="replace")) if log.exists() else []
    return int(found[-1]) if found else launcher_code
