"""Which linear runs in what precision and why, what really ran, and weights stored in FP8."""
