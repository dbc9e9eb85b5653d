"""Tactics of ``mul``."""
