"""Tactics of ``quantize_q8``."""
