"""Tiny Wan2.2 checkpoints: how they are built and trained, and how a finished clip is judged."""
