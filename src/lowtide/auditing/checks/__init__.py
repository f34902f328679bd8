"""The checks: each looks at a case and returns its result. One module for each question or two.

A check's name is part of the report's format: programs and recorded surveys refer to it.
"""
