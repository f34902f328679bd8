"""Simulates a training step without a device: meta tensors, the few values that matter, a ledger, a virtual clock."""
