"""One case of ``gpu.py`` in a process of its own: predict it on the meta device, then train it with the stock Trainer
and measure. ``--probe`` tells the machine instead.

Everything is counted from the moment that the Trainer gets its model on the host: loading the weights onto the GPU is
part of the run. The file of ``--out`` is written after the prediction and again after the measurement, so a process
that dies leaves what it had.

    python benchmarks/gpu_case.py --case '{"model": "BERT-large", "setup": "bf16"}' --device cuda --out FILE
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_figures import CRASH, MEASURED, OOM, SKIPPED, errors_of  # noqa: E402
from gpu_meters import GpuMeter, HostMeter, ask_driver, state_tensors, storage_bytes  # noqa: E402
from gpu_setups import Case, build_model, estimate_settings, missing_package, training_arguments  # noqa: E402

STEPS, WARMUP_STEPS = 4, 2
PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "peft")
COMPONENTS = ("weights", "gradients", "optimizer state")

Figures = dict[str, Any]


# ---- The machine ----------------------------------------------------------------------------------------------------


def probe(device: str) -> Figures:
    """Return what the runs of this machine have in common."""
    import results_file
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    found: Figures = {"machine": results_file.machine(), "gpu": "cpu", "versions": versions}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "uuid": str(getattr(properties, "uuid", "")) or None}
        found |= {"device_total_bytes": properties.total_memory, "capability": [properties.major, properties.minor]}
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
        versions["driver"] = (ask_driver("driver_version", found["uuid"]) or "not told").strip()
    return found


# ---- Predicted ------------------------------------------------------------------------------------------------------


def predict(case: Case) -> Figures:
    """Return the figures of the estimate, by the names of the measured ones."""
    from hf_memopt.prediction.memory import estimate
    from hf_memopt.prediction.memory.tracking import COMPONENTS as NAMES

    model = build_model(case, "meta")
    found = estimate(model, batch_size=case.batch_size, seq_len=case.seq_len, **estimate_settings(case))
    return {
        "allocated_bytes": found.peak_allocated_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
        "context_bytes": found.context_bytes,
        "components": {name: int(found.timeline.components[:, NAMES.index(name)].max()) for name in COMPONENTS},
        "components_at_peak": found.components,
        "phase": found.phase,
        "module": found.module,
        "fits": found.fits,
        "notes": list(found.notes),
    }


# ---- Measured -------------------------------------------------------------------------------------------------------


def make_recorder(meter: Any, device: str) -> Any:
    """Return the callback that times the steps and counts the gradients."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def __init__(self) -> None:
            self.gradient_bytes: int | None = None
            self.step_seconds: list[float] = []
            self._begin = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.synchronise()
            self._begin = time.perf_counter()

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            self.gradient_bytes = storage_bytes(gradients, device)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.synchronise()
            self.step_seconds.append(time.perf_counter() - self._begin)

    return Recorder()


def measure(case: Case, device: str, meter: Any, figures: Figures) -> None:
    """Train the case and put what was measured into ``figures``, as far as it came: an OOM has its peaks too."""
    import torch
    from transformers import Trainer

    measured: Figures = {"source": meter.source, "context_bytes": meter.make_context()}
    figures["measured"] = measured
    # drawn where that is fast, then handed over on the host as from_pretrained does, without its reserved blocks
    model = build_model(case, device).to("cpu")
    for prepare in estimate_settings(case)["prepare"]:
        prepare(model)
    recorder = make_recorder(meter, device)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(case, folder, steps=STEPS, use_cpu=device == "cpu")
        rows = make_rows(case, STEPS * case.batch_size * case.settings.accumulation)
        meter.begin(model)
        try:
            trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[recorder])
            trainer.train()
        except torch.OutOfMemoryError as error:
            figures |= {"status": OOM, "reason": str(error).splitlines()[0]}
        measured |= meter.end()
    if figures.get("status") == OOM:
        return
    state = state_tensors(dict(trainer.optimizer.state))
    measured |= {
        "components": {
            "weights": storage_bytes([*model.parameters(), *model.buffers()], device),
            "gradients": recorder.gradient_bytes,
            "optimizer state": storage_bytes(state, device),
        },
        "step_seconds": round(statistics.median(recorder.step_seconds[WARMUP_STEPS:]), 4),
    }
    figures["status"] = MEASURED


def make_rows(case: Case, count: int) -> list[Figures]:
    """Return ``count`` random examples whose batches have the very shapes that the estimate assumes.

    With padding every other row ends in some: an eighth of it, at least one token.
    """
    import torch

    from hf_memopt.prediction.memory.models import example_batch

    model = build_model(case, "meta")
    batch = example_batch(model, batch_size=case.batch_size, seq_len=case.seq_len)
    torch.manual_seed(0)
    rows = [{name: _random_like(name, tensor[0], model.config) for name, tensor in batch.items()} for _ in range(count)]
    if case.settings.padding:
        for row in rows[1::2]:
            for name in row.keys() & {"attention_mask", "decoder_attention_mask"}:
                row[name][-max(1, len(row[name]) // 8) :] = 0
    return rows


def _random_like(name: str, example: Any, config: Any) -> Any:
    """Return a random value for one example; ids stay clear of the special tokens at either end of the vocabulary."""
    import torch

    if example.is_floating_point():
        return torch.randn(example.shape, dtype=example.dtype)
    if name.endswith("attention_mask"):
        return torch.ones(example.shape, dtype=example.dtype)
    if name == "token_type_ids":
        return torch.zeros(example.shape, dtype=example.dtype)
    if name == "labels" and example.dim() == 0:
        return torch.randint(config.num_labels, (), dtype=example.dtype)
    return torch.randint(10, config.vocab_size - 10, example.shape, dtype=example.dtype)


# ---- The process ----------------------------------------------------------------------------------------------------


def run(case: Case, device: str, machine: Figures, out: Path) -> None:
    """Predict and measure; write the figures to ``out`` after each."""
    import torch

    figures: Figures = {"status": CRASH, "predicted": None, "measured": None, "errors": {}}
    package = missing_package(case)
    if package is not None:
        _write(out, figures | {"status": SKIPPED, "reason": f"{package} is not installed"})
        return
    if device == "cuda" and case.settings.precision == "bf16" and machine["capability"] < [8, 0]:
        _write(out, figures | {"status": SKIPPED, "reason": "this GPU does not compute bfloat16 natively"})
        return
    meter = GpuMeter(machine.get("uuid")) if device == "cuda" else HostMeter()  # reads the GPU before any context
    try:
        figures["predicted"] = predict(case)
    except Exception as error:
        figures["reason"] = f"not predicted: {type(error).__name__}: {error}"
    _write(out, figures)
    try:
        measure(case, device, meter, figures)
    except torch.OutOfMemoryError as error:  # the model itself does not fit
        figures |= {"status": OOM, "reason": str(error).splitlines()[0]}
    if figures["predicted"] and figures["status"] == MEASURED:
        figures["errors"] = errors_of(figures["predicted"], figures["measured"])
    _write(out, figures)


def _write(out: Path, figures: Figures) -> None:
    out.write_text(json.dumps(figures), encoding="utf-8")


def main() -> int:
    """Run one case, or tell the machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--case", type=json.loads, default=None, metavar="JSON")
    parser.add_argument("--machine", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    if options.probe:
        _write(options.out, probe(options.device))
    else:
        run(Case(**options.case), options.device, options.machine, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
