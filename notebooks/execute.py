"""Run the notebooks offline, each in an empty folder, and store what they show.

python notebooks/execute.py            # all of them
python notebooks/execute.py quickstart
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
LONGEST_SECONDS = 300  # of a cell, on a loaded machine


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with its outputs; what is written to standard error is left out.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=LONGEST_SECONDS, resources={"metadata": {"path": folder}})
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    return notebook


def main(names: list[str]) -> None:
    """Run the named notebooks, or all."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            begin = time.perf_counter()
            notebook = execute(path)
            nbformat.write(notebook, path)
            print(f"{path.name}: {len(notebook.cells)} cells, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
