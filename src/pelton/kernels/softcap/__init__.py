"""Tactics of ``softcap``."""
