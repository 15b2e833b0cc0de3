"""Measures overlap beside torch's own communication: `overlap bench allreduce` and `overlap bench step`."""
