"""Tells the whole story on a machine without a GPU: every figure that `lowtide demo` prints is measured on the way."""
