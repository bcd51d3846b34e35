"""The programs of the table in docs/rehearse.md: each stored row holds, and is what a rehearsal says today."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import judge
import pytest
import rehearsals
from packaging.version import Version

from hf_memopt import estimate

STORED = rehearsals.stored()
REFERENCES = {  # of a program of preferences, the weights of which models stand at the peak
    "TRL: DPO, a copy as reference": ["weights of Qwen2ForCausalLM", "weights of Qwen2ForCausalLM, not trained"],
    "TRL: DPO, the model without its adapter": ["weights of PeftModel"],
    "TRL: DPO, a precomputed reference": ["weights of Qwen2ForCausalLM"],
}
TRAINING = ["forward", "backward", "optimizer"]
SCORED = {
    "TRL: GRPO with a reward model": ["load", "generation", "scoring", *TRAINING],
    "TRL: RLOO": ["load", "generation", "scoring", *TRAINING],
    "TRL: DPO, a precomputed reference": ["load", "scoring", *TRAINING],
}
ESTIMATED = {  # the same set-up for `estimate`, of programs of the stock Trainer
    "Trainer, 1 B parameters": {
        "model": "meta-llama/Llama-3.2-1B",
        "weights_dtype": "bfloat16",
        "precision": "bf16",
        "batch_size": 4,
        "seq_len": 512,
        "gradient_accumulation_steps": 2,
        "padding": False,  # all rows have 512 tokens
    },
    "ViT": {
        "model": "google/vit-base-patch16-224",
        "task": "image-classification",
        "precision": "fp16",
        "batch_size": 64,
    },
}


@pytest.mark.skipif(
    Version(version("transformers")) < Version("5.23"), reason="the stored peaks are of transformers 5.23"
)
@pytest.mark.parametrize("name", ESTIMATED)
def test_a_rehearsal_of_the_stock_trainer_is_what_estimate_says(name: str) -> None:
    figures = STORED[name]["figures"]
    found = estimate(**ESTIMATED[name], gpu=figures["gpu"])
    for phase in ("forward", "backward"):
        rehearsed = figures["phases"][phase]
        assert found.phases[phase].allocated_bytes == pytest.approx(rehearsed, rel=judge.BOUNDS["allocated_bytes"])


@pytest.mark.parametrize("name", rehearsals.PROGRAMS)
def test_two_rehearsals_are_equal_and_the_verdict_flips_at_the_need(name: str) -> None:
    program, figures = rehearsals.PROGRAMS[name], STORED[name]["figures"]
    assert rehearsals.holds(figures), figures
    assert (figures["gpu"], figures["gpus"]) == (program.gpu, program.gpus)


@pytest.mark.parametrize("name", [name for name in REFERENCES if name in STORED])
def test_a_reference_model_is_named_apart_from_the_policy(name: str) -> None:
    assert STORED[name]["figures"]["weights"] == REFERENCES[name]


@pytest.mark.parametrize("name", [name for name in SCORED if name in STORED])
def test_generation_and_scoring_are_phases_apart_from_training(name: str) -> None:
    assert list(STORED[name]["figures"]["phases"]) == SCORED[name]


@pytest.mark.stand_in
@pytest.mark.parametrize("name", [name for name in STORED if not rehearsals.PROGRAMS[name].compiles])
def test_a_rehearsal_is_the_stored_one(name: str) -> None:
    """But for torch.compile, whose first run takes minutes, and differs from those that find its kernels."""
    row = STORED[name]
    for package in ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate"):
        try:
            if row["versions"][package] != version(package):
                pytest.skip(f"the row is of {package} {row['versions'][package]}")
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    found, figures = rehearsals.rehearsed(rehearsals.PROGRAMS[name]), row["figures"]
    assert (found.verdict, found.peak_phase) == (figures["verdict"], figures["peak_phase"])
    assert found.needed_bytes == pytest.approx(figures["needed_bytes"], rel=1 / 400)  # to which it is searched
    assert {phase: peak.allocated_bytes for phase, peak in found.phases.items()} == figures["phases"]
    assert sorted(one.place for one in found.held if one.place.startswith("weights of ")) == figures["weights"]
