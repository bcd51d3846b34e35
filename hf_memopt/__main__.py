"""``python -m hf_memopt``: the same commands as ``hf-memopt``."""

from hf_memopt.cli import main

if __name__ == "__main__":
    main()
