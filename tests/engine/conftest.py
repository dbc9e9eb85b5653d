"""The tiny engine of the builder's tests, for the engine's."""

from tests.builder.conftest import tiny_engine

__all__ = ["tiny_engine"]
