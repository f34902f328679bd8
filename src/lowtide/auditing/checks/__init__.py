"""The checks: each looks at a case and gives its verdict. One module per question."""
