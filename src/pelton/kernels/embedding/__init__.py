"""Tactics of ``embedding``."""
