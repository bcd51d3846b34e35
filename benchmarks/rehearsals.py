"""The programs that ``hf-memopt rehearse`` is shown to work with: python benchmarks/rehearsals.py

Each script in ``rehearsed/`` is rehearsed twice on a common GPU, then with 1 % more and 1 % less than the memory it was
found to need. The rows go to ``results/rehearsals-<torch's version>.jsonl``, and a run goes on where it stopped. It
needs a CUDA build of torch, transformers, TRL, PEFT, bitsandbytes, Liger and sentence-transformers; no GPU.

python benchmarks/rehearsals.py --program "GRPO"  # one anew
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from results_file import RESULTS, append, markdown

from hf_memopt import rehearse
from hf_memopt.gpus import find_gpu
from hf_memopt.types import Rehearsal
from hf_memopt.units import to_gib

SCRIPTS = Path(__file__).with_name("rehearsed")
RTX_3060, RTX_4090, T4 = "RTX 3060 12GB", "RTX 4090", "T4"


class Program(NamedTuple):
    """A script with its arguments, and the GPUs that it is rehearsed on."""

    command: str
    gpu: str = RTX_3060
    gpus: int = 1
    compiles: bool = False  # and keeps its kernels: the run that makes them takes minutes, and holds one block more


PROGRAMS = {
    "plain loop of PyTorch": Program("plain_loop.py"),
    "Trainer, 1 B parameters": Program("stock_trainer.py", RTX_4090),
    "Seq2SeqTrainer with generation": Program("seq2seq.py"),
    "PEFT": Program("lora.py", T4),
    "QLoRA, prepared by PEFT": Program("qlora.py peft"),
    "QLoRA, prepared by hf_memopt": Program("qlora.py ours"),
    "TRL: SFT": Program("sft.py", RTX_4090),
    "TRL: DPO, a copy as reference": Program("dpo.py copy"),
    "TRL: DPO, the model without its adapter": Program("dpo.py adapter"),
    "TRL: DPO, a precomputed reference": Program("dpo.py precomputed"),
    "TRL: KTO": Program("kto.py"),
    "TRL: Reward": Program("reward.py"),
    "TRL: GRPO with a reward model": Program("grpo.py", RTX_4090),
    "TRL: RLOO": Program("rloo.py", RTX_4090),
    "sentence-transformers": Program("embeddings.py", T4),
    "accelerate's own loop": Program("accelerate_loop.py"),
    "Liger": Program("liger.py"),
    "torch.compile": Program("compiled.py", compiles=True),
    "ViT": Program("vit.py", T4),
    "Whisper": Program("whisper.py", T4),
    "CLIP": Program("clip.py"),
    "vision and language": Program("vision_language.py", RTX_4090),
    "Mixtral": Program("mixtral.py"),
    "DDP": Program("ddp.py", T4, gpus=2),
    "FSDP2": Program("fsdp2.py", gpus=2),
}


def rehearsed(program: Program, usable_bytes: int | None = None) -> Rehearsal:
    """Return a rehearsal of a program on its GPU, or on one with other memory."""
    script, *arguments = program.command.split()
    gpu = find_gpu(program.gpu)
    gpu = gpu if usable_bytes is None else replace(gpu, usable_bytes=usable_bytes)
    before, os.environ["OMP_NUM_THREADS"] = Path.cwd(), "1"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for what the script writes
        try:
            return rehearse(SCRIPTS / script, *arguments, gpu=gpu, gpus=program.gpus, empty_weights=True)
        finally:
            os.chdir(before)


def figures_of(program: Program) -> dict[str, Any]:
    """Return what a program needs, whether that is the same again, and what 1 % more and less of it do."""
    if program.compiles:
        rehearsed(program)
    found = rehearsed(program)
    figures = {"gpu": program.gpu, "gpus": program.gpus, "verdict": found.verdict, "seconds": round(found.seconds, 1)}
    if found.needed_bytes is None:
        return figures
    again = rehearsed(program)
    more, less = (rehearsed(program, found.needed_bytes * percent // 100) for percent in (101, 99))
    return {
        **figures,
        "needed_bytes": found.needed_bytes,
        "peak_phase": found.peak_phase,
        "phases": {name: peak.allocated_bytes for name, peak in found.phases.items()},
        "weights": sorted(one.place for one in found.held if one.place.startswith("weights of ")),
        "is_equal": replace(again, seconds=found.seconds) == found,
        "fits_above": more.fits and not more.recovered,
        "runs_out_below": None if less.out_of_memory is None else less.out_of_memory.phase,
        "notes": found.notes,
    }


def stored(torch_version: str = "*") -> dict[str, dict[str, Any]]:
    """Return the latest row of each program in their order, of the newest torch unless one is given."""
    files = sorted(RESULTS.glob(f"rehearsals-{torch_version}.jsonl"))
    rows = [json.loads(line) for file in files[-1:] for line in file.read_text(encoding="utf-8").splitlines()]
    found = {row["case"]: row for row in rows}
    return {name: found[name] for name in PROGRAMS if name in found}


def holds(figures: Mapping[str, Any]) -> bool:
    """Return whether two rehearsals were equal, 1 % more was enough, and 1 % less ran out in the named phase."""
    return (
        figures["verdict"] == "fits"
        and figures["is_equal"]
        and figures["fits_above"]
        and figures["runs_out_below"] == figures["peak_phase"]
    )


def table(rows: Mapping[str, Any]) -> str:
    """Return a line for each program."""
    lines, of_torch = [], max(row["versions"]["torch"] for row in rows.values())
    for name, row in rows.items():
        figures = row["figures"]
        gpu = f"{figures['gpus']} x {figures['gpu']}" if figures["gpus"] > 1 else figures["gpu"]
        cells = [f"{name} (`{PROGRAMS[name].command}`)", gpu]
        if figures["verdict"] != "fits":
            lines.append([*cells, figures["verdict"], "", f"{figures['seconds']:.0f}"])
            continue
        needed = f"{to_gib(figures['needed_bytes']):.2f} GiB"
        lines.append([*cells, needed, figures["peak_phase"], f"{figures['seconds']:.0f}"])
    true = sum(holds(row["figures"]) for row in rows.values())
    note = (
        f"Rehearsed without a GPU (`python benchmarks/rehearsals.py`), PyTorch {of_torch.partition('+')[0]}. The "
        f"seconds are of 2 CPU cores that other work shared. For {true} of {len(rows)} programs two rehearsals are "
        "equal to the byte. With 1 % more memory than needed they fit; with 1 % less they run out in the named phase."
    )
    if others := [name for name, row in rows.items() if not holds(row["figures"])]:
        note += f" Exceptions: {'; '.join(others)}."
    return markdown("| program | GPU | needed | phase of the peak | seconds |", lines, note)


def example() -> str:
    """Return what the command of docs/rehearse.md printed, which ``--json`` kept."""
    found = Rehearsal.from_json((RESULTS / "rehearsal-example.json").read_bytes())
    return f"```text\n{found.table()}\n```\n"


def main(arguments: list[str] | None = None) -> None:
    """Rehearse what is missing, append the rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", action="append", choices=PROGRAMS, metavar="NAME", help="only this one, anew")
    given = parser.parse_args(arguments)
    torch_version = version("torch").partition("+")[0]
    done = stored(torch_version)
    for name in given.program or [name for name in PROGRAMS if name not in done]:
        figures = figures_of(PROGRAMS[name])
        if figures["verdict"] in ("fits", "runs out"):
            append(name, figures, path=RESULTS / f"rehearsals-{torch_version}.jsonl")
        print(name, figures, flush=True)
    rows = stored(torch_version)
    print(table({name: rows[name] for name in given.program or PROGRAMS if name in rows}))


if __name__ == "__main__":
    main()
