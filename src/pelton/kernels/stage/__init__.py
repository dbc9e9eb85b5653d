"""A step's inputs on their way to a GPU: packed in the host's memory, laid out by one kernel."""
