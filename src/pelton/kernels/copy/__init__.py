"""Tactics of ``copy``."""
