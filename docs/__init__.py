"""The documentation, and the generator of those parts of it that the code knows."""
