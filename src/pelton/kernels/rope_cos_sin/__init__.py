"""Tactics of ``rope_cos_sin``."""
