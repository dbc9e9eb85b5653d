"""Tactics of ``scale``."""
