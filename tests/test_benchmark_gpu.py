"""benchmarks/gpu.py: what a case means for the estimate and the Trainer, and a tiny run of each on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_case
import gpu_setups as setups
import pytest
from slow_cases import slow_except


def test_estimate_and_trainer_are_told_the_same(tmp_path) -> None:
    from hf_memopt.prediction.memory.settings import StepSettings

    own = [setups.Case("BERT-large", setup, tiny=True) for setup in setups.SETUPS]
    for case in own:
        settings = StepSettings(**setups.estimate_settings(case))
        args = setups.training_arguments(case, str(tmp_path), steps=4, use_cpu=True)
        assert args.bf16 is (settings.precision == "bf16")
        assert args.optim == settings.optim
        assert args.gradient_accumulation_steps == settings.gradient_accumulation_steps
        assert args.max_grad_norm == settings.max_grad_norm
        assert args.label_smoothing_factor == settings.label_smoothing_factor
        checkpointing = getattr(args, "activation_checkpointing", args.gradient_checkpointing)
        assert bool(checkpointing) is bool(settings.checkpointing)
        assert args.per_device_train_batch_size == case.batch_size


# ---- Tiny runs ------------------------------------------------------------------------------------------------------


def found_by(case: Any, folder: Path, device: str = "cpu", **facts: Any) -> Any:
    """Run a case in this process; return what it writes."""
    gpu_case.run(case, device, facts, folder / "out.json")
    return json.loads((folder / "out.json").read_text("utf-8"))


@pytest.mark.parametrize("index", slow_except((0,), range(8)))
def test_every_model_and_every_setup_runs_tiny_on_the_host(tmp_path, index) -> None:
    found = found_by(setups.ordered_cases(tiny=True)[index], tmp_path)
    assert found["status"] == "measured", found
    assert found["predicted"] is not None, found["reason"]
    errors = found["errors"]
    assert set(errors) == {"allocated", "weights", "gradients", "optimizer state"}
    # The GPU's allocator rounds every tensor up to 512 bytes: 1 to 5 % of tensors this small. The host's kernels keep
    # dropout masks in floats and other temporaries, and its attention is another.
    assert all(0 <= errors[name] <= 6 for name in ("weights", "gradients", "optimizer state")), errors
    assert abs(errors["allocated"]) <= 10, errors
