"""Tactics of ``take_columns``."""
