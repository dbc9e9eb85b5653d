"""Tactics of ``layer_norm``."""
