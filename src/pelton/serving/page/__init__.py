"""The HTML page of an engine: ``pelton inspect --html``."""
