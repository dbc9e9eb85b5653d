"""Tactics of ``unary``."""
