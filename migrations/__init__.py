"""The schema, one file a change, applied with `python -m migrations upgrade`."""
