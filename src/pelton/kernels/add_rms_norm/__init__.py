"""Tactics of ``add_rms_norm``."""
