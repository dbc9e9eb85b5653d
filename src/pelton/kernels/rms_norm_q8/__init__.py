"""Tactics of ``rms_norm_q8``."""
