"""Turns what a user names into a model: one grammar for `plan` and `audit`."""
