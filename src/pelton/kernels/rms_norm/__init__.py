"""Tactics of ``rms_norm``."""
