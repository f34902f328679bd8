"""Thin adapters, one module per framework. Each imports its framework; `import lowtide` imports none of them."""
