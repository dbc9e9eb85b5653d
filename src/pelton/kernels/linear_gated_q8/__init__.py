"""Tactics of ``linear_gated_q8``."""
