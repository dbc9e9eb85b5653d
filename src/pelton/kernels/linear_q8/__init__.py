"""Tactics of ``linear_q8``."""
