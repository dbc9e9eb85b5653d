"""Tactics of ``gated_activation``."""
