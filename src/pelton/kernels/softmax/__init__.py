"""Tactics of ``softmax``."""
