"""Tactics of ``rope_interleaved``."""
