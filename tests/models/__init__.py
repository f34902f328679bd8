"""Models that several test modules train, each with the batches that fit it."""
