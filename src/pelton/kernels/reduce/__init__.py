"""Tactics of ``reduce``."""
