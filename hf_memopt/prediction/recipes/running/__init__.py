"""Somebody's script, run unchanged with what does not change its result."""
