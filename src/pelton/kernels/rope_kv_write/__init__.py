"""Tactics of ``rope_kv_write``."""
