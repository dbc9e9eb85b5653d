"""Tactics of ``add``."""
