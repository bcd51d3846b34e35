"""Checkpoints written in parts, and without what a resume does not need."""
