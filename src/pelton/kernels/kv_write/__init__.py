"""Tactics of ``kv_write``."""
