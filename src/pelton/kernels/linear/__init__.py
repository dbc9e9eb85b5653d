"""Tactics of ``linear``: products with dense and block-quantised weights."""
