"""Tactics of ``binary``."""
