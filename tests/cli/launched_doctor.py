"""``hf-memopt doctor --launch`` in one rank: python launched_doctor.py FOLDER [missing]."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

from hf_memopt.cli import doctor_launch
from hf_memopt.cli.app import app


def main(folder: str, *more: str) -> None:
    """Write the exit code and what was printed; of two ranks the second is ``missing`` where that is said."""
    os.environ["COLUMNS"] = "160"
    found = []
    if "missing" not in more:
        for arguments in (["--launch"], ["--launch", "--json"]):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                try:
                    app(["doctor", *arguments])
                except SystemExit as stop:
                    found.append([stop.code, output.getvalue()])
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    elif os.environ["RANK"] != "1":
        started = time.monotonic()
        try:
            doctor_launch.examine_launch(json_output=False, timeout_seconds=1.0)
        except OSError as error:
            found.append([f"{type(error).__name__}: {error}", time.monotonic() - started])
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
