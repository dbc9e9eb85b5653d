"""Tactics of ``linear_gated``."""
