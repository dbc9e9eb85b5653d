"""Tactics of ``to_float32``."""
