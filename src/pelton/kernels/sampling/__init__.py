"""Choosing tokens from logits: the definition in numpy, and the native library's version of it."""
