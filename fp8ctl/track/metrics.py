"""Every metric: one name, one unit, one definition. Reports, MLflow and the terminal take them from here."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """What one number of metrics.jsonl means."""

    unit: str
    definition: str


METRICS: dict[str, Metric] = {
    "loss": Metric("nats/token", "cross-entropy summed over the trainable tokens of the global batch / their number"),
    "validation_loss": Metric(
        "nats/token",
        "the same over the fixed rows of the validation split, without dropout or update; of a mixture the mean by shares",
    ),
    "validation_losses": Metric("nats/token", "the validation loss of each data set of a mixture, by its path"),
    "grad_norm": Metric("1", "L2 norm of the whole gradient before clipping"),
    "lr": Metric("1", "learning rate of this step"),
    "trainable_tokens": Metric("tokens", "tokens of the global batch that carry loss"),
    "tokens": Metric("tokens", "tokens of the global batch, padding left out"),
    "tokens_seen": Metric("tokens", "sum of `tokens` over all steps so far, across resumes"),
    "padding_share": Metric("1", "padding positions / all positions of the global batch"),
    "step_time_s": Metric("s", "wall time of the whole step on rank 0, data wait to optimizer"),
    "data_wait_s": Metric("s", "wall time waiting for the loader"),
    "data_wait_share": Metric("1", "data_wait_s / step_time_s"),
    "forward_s": Metric("s", "wall time of the forward passes and losses"),
    "backward_s": Metric(
        "s", "wall time of the backward passes, gradient reduction included where the engine overlaps it"
    ),
    "optimizer_s": Metric("s", "wall time of norm, clipping and update"),
    "tokens_per_second": Metric("tokens/s", "tokens / step_time_s over all ranks"),
    "memory_peak_bytes": Metric(
        "bytes", "largest memory of any rank so far: allocated on a GPU, resident set on a CPU"
    ),
    "fp8_flops_share": Metric(
        "1", "FLOPs of GEMMs executed in FP8 / FLOPs of all linear GEMMs in this step, head included"
    ),
}
