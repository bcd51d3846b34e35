"""Modules that work on each position alone: found, and run over tiles of positions."""
