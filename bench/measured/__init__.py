"""Compares plans with peak memory that others measured on GPUs. Run `python -m bench.measured.compare`."""
