"""Tactics of ``norm_linear``."""
