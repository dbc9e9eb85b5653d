"""Tactics of ``paged_attention``."""
