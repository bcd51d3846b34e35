"""Run the notebooks offline, each in an empty folder, and store what they show.

python notebooks/execute.py            # all of them
python notebooks/execute.py quickstart

README quotes the notices of one; ``python benchmarks/table.py`` puts them there.
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
PATHS = [str(FOLDER.parent / "examples" / "demo"), *filter(None, [os.environ.get("PYTHONPATH")])]  # of the texts
LONGEST_SECONDS = 300  # of a cell, on a loaded machine
NOTICE = "[memopt] "  # begins what the package says while it trains


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with its outputs; of standard error, the notices of the package alone.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONPATH=os.pathsep.join(PATHS))
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=LONGEST_SECONDS, resources={"metadata": {"path": folder}})
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":
            cell.outputs = shown_outputs(cell.outputs)
    notebook.metadata.pop("language_info", None)
    return notebook


def shown_outputs(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return the outputs of a cell in their order, with one output for what was printed in between."""
    shown: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type != "stream":
            shown.append(output)
            continue
        kept = [output.text]
        if output.name == "stderr":
            kept = [f"{line}\n" for line in output.text.splitlines() if line.startswith(NOTICE)]
        if kept and shown and shown[-1].output_type == "stream":
            shown[-1].text += "".join(kept)
        elif kept:
            shown.append(nbformat.v4.new_output("stream", name="stdout", text="".join(kept)))
    return shown


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
