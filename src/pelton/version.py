"""The version, where every package may import it."""

__version__ = "0.1.0"
