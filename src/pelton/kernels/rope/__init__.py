"""Tactics of ``rope``."""
