"""Tactics of ``add_rms_norm_q8``."""
