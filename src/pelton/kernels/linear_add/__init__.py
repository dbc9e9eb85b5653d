"""Tactics of ``linear_add``."""
