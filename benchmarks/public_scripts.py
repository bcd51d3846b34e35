"""Public training scripts, rehearsed as they are: python benchmarks/public_scripts.py TRANSFORMERS_SRC NANOGPT_SRC

The arguments are checkouts of huggingface/transformers and karpathy/nanoGPT; TRL's scripts lie in its wheel. Models are
named as on the Hub and have empty weights, the data is random words. Each script is rehearsed four times: twice alike,
then with 1 % more and 1 % less than what it needs. The rows go to ``results/public-scripts-<torch's version>.jsonl``.
It needs a CUDA build of torch, and no GPU. While torch.compile's cache is empty nanoGPT reserves 2 MiB more.

python benchmarks/public_scripts.py TRANSFORMERS_SRC NANOGPT_SRC --script nanoGPT/train.py  # one of them anew
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import replace
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import numpy as np
from results_file import RESULTS, append, markdown

from hf_memopt import rehearse
from hf_memopt.gpus import find_gpu
from hf_memopt.types import Rehearsal
from hf_memopt.units import to_gib

EVALUATE = "def load(*names, **settings):\n    return None\n"  # a rehearsal computes no metrics
Figures = Mapping[str, Any]


SCRIPTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Those with ``loads_metrics`` load them from the Hub, by the package evaluate, for which a stub stands in."""


def write_data(folder: Path) -> None:
    """Write what the scripts read, of random words, and the stub."""
    draw, words = random.Random(0), ("a", "row", "of", "the", "text", "that", "models", "learn", "to", "read", "often")

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(most // 5, most)))

    def said(role: str, most: int) -> list[dict[str, str]]:
        return [{"role": role, "content": text(most)}]

    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "chats": lambda: {"messages": said("user", 40) + said("assistant", 400)},
        "preferences": lambda: {
            "prompt": said("user", 40),
            **{name: said("assistant", 300) for name in ("chosen", "rejected")},
        },
        "verdicts": lambda: {
            **{"prompt": said("user", 40), "completion": said("assistant", 300), "label": draw.random() < 0.5}
        },
        "translations": lambda: {"translation": {"en": text(200), "de": text(200)}},
        "pairs": lambda: {"sentence1": text(60), "sentence2": text(60), "label": draw.randrange(2)},
        "texts": lambda: {"text": text(400)},
        "endings": lambda: {
            **{"sent1": text(20), "sent2": text(5), "label": draw.randrange(4)},
            **{f"ending{number}": text(20) for number in range(4)},
        },
    }
    for name, make in rows.items():
        (folder / name).mkdir()
        for split in ("train", "test"):
            lines = (json.dumps(make()) for _ in range(256))
            (folder / name / f"{split}.json").write_text("\n".join(lines), encoding="utf-8")
    (folder / "stubs").mkdir()
    (folder / "stubs" / "evaluate.py").write_text(EVALUATE, encoding="utf-8")
    for split in ("train", "val"):
        tokens = np.random.default_rng(0).integers(0, 50257, 100_000, dtype=np.uint16)
        tokens.tofile(folder / "nanoGPT" / "data" / "openwebtext" / f"{split}.bin")


def four_rehearsals(path: Path, script: Figures) -> dict[str, Any]:
    """Return what four rehearsals found, or the verdict of a script that does not fit."""
    gpu = find_gpu(script["gpu"])

    def once(usable_bytes: int) -> Rehearsal:
        with_less = replace(gpu, usable_bytes=usable_bytes)
        return rehearse(path, *script["arguments"].split(), gpu=with_less, empty_weights=True)

    found, again = once(gpu.usable_bytes), once(gpu.usable_bytes)
    figures: dict[str, Any] = {"gpu": gpu.name, "arguments": script["arguments"], "verdict": found.verdict}
    if found.needed_bytes is None:
        return figures
    more, less = (once(found.needed_bytes * percent // 100) for percent in (101, 99))
    return figures | {
        **{
            "needed_bytes": found.needed_bytes,
            "phase": found.peak_phase,
            "equal": replace(again, seconds=found.seconds) == found,
        },
        **{"verdict_with_more": more.verdict, "verdict_with_less": less.verdict},
        "out_in": less.out_of_memory and less.out_of_memory.phase,
        "phases": {phase: [peak.allocated_bytes, peak.reserved_bytes] for phase, peak in found.phases.items()},
        "largest_batch": str(found.largest_batch),
        "seconds": [round(one.seconds, 1) for one in (found, again, more, less)],
        "notes": [*found.notes, *(["evaluate.load is a stub"] if script["loads_metrics"] else [])],
    }


def holds(row: Figures) -> bool:
    """Return whether a row is twice equal, fits with 1 % more, and with 1 % less runs out in the phase it names."""
    verdicts = (row.get("verdict_with_more"), row.get("verdict_with_less"))
    return verdicts == ("fits", "runs out") and row["equal"] and row["out_in"] == row["phase"]


def table(rows: Mapping[str, Figures]) -> str:
    """Return a line for each script."""
    lines = []
    for name, row in rows.items():
        needed = f"{to_gib(row['needed_bytes']):.2f}" if "needed_bytes" in row else "-"
        cells = [str(row.get(what, "-")) for what in ("phase", "equal", "verdict_with_more", "out_in")]
        lines.append(
            [name.replace("examples/pytorch/", ""), row["gpu"], needed, *cells, f"{row.get('seconds', [0])[0]:.0f}"]
        )
    return markdown("| script | GPU | needed, GiB | in | twice equal | + 1 % | - 1 %: out in | seconds |", lines)


def stored_rows() -> dict[str, dict[str, Any]]:
    """Return the stored rows by script, the latest of each, of the newest torch."""
    files = sorted(RESULTS.glob("public-scripts-*.jsonl"))
    rows = [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines()]
    return {row["case"]: row["figures"] for row in rows}


def main(arguments: list[str] | None = None) -> None:
    """Rehearse, append a row for each script, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("transformers", type=Path, help="a checkout of huggingface/transformers")
    parser.add_argument("nanogpt", type=Path, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--script", action="append", choices=SCRIPTS, metavar="NAME", help="only this one")
    given = parser.parse_args(arguments)
    results = RESULTS / f"public-scripts-{version('torch').partition('+')[0]}.jsonl"
    trl = Path(str(distribution("trl").locate_file("trl")))
    folders = {"trl": trl, "transformers": given.transformers.resolve(), "nanoGPT": given.nanogpt.resolve()}
    rows = {}
    for name in given.script or SCRIPTS:
        rows[name] = rehearse_one(name, folders)
        append(name, rows[name], path=results)
        print(name, rows[name]["verdict"], f"{sum(rows[name].get('seconds', [])):.0f} s", flush=True)
    print(table(rows))


def rehearse_one(name: str, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Rehearse a script in a temporary folder with its data; return what was found, and of which source."""
    (source, _, rest), script, before = name.partition("/"), SCRIPTS[name], dict(os.environ)
    described = ["git", "-C", str(folders[source]), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    commit = version("trl") if source == "trl" else subprocess.check_output(described, text=True).strip()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        nanogpt = shutil.copytree(folders["nanoGPT"], folder / "nanoGPT")  # reads and writes beside itself
        (nanogpt / "data" / "openwebtext").mkdir(parents=True, exist_ok=True)
        write_data(folder)
        stubs = [str(folder / "stubs")] if script["loads_metrics"] else []
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*stubs, before.get("PYTHONPATH")]))
        os.environ |= {"HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        here = nanogpt if source == "nanoGPT" else folder
        try:
            with chdir(here):
                found = four_rehearsals((here if here is nanogpt else folders[source]) / rest, script)
        finally:
            os.environ.clear()
            os.environ.update(before)
    return {"source": f"{source} {commit}", **found}


if __name__ == "__main__":
    main()
