"""Tactics of ``binary_scalar``."""
