"""The recipe of the trained tiny checkpoints; run it with `python -m models.training`."""
