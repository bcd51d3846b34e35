"""Train a small BERT on text that Python ships with, on a CPU that pretends to be a GPU too small.

Stock runs out of memory; stock with ``auto_find_batch_size`` trains something else; with ``MicrobatchCallback`` every
loss and weight is that of a run without a limit; then what ``plan`` chooses, and a model larger than the GPU.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile


def main() -> None:
    """Run the demo and print the table."""
    parser = argparse.ArgumentParser(prog="python examples/demo", description=__doc__.splitlines()[0])
    parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is there is not the one that is pretended
    # its warning at import is about a 4-bit kernel that the demo does not use; seen in bitsandbytes 0.50.2
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from outcomes import run_demo

    try:
        with tempfile.TemporaryDirectory() as folder:
            run_demo(folder)
    except ValueError as error:  # a Python without the sources of its standard library
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
