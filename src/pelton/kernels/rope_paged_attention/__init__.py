"""Tactics of ``rope_paged_attention``."""
