"""Tactics of ``norm_linear_gated``."""
