"""Tactics of ``take_rows``."""
