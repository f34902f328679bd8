"""Knows the accelerators: their data sheets, which one is here, and what share of its figures is reached."""
