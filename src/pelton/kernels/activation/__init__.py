"""Tactics of ``activation``."""
