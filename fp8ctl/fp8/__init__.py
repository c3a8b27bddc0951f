"""Number formats, quantisers, GEMMs and the linear layer that runs in FP8."""
