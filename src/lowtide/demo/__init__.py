"""`lowtide demo`: the whole story on a machine without a GPU, with everything that it says measured on the way."""
