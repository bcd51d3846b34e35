"""The command line."""

from hf_memopt.cli.app import main

__all__ = ["main"]
