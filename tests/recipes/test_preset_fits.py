"""The presets hold what they are meant for, by the estimate."""

from __future__ import annotations

import subprocess
import sys

import pytest
from slow_cases import slow_except

from hf_memopt import estimate, recipe
from hf_memopt.gpus import find_gpu

SMALLEST_GPUS = {
    "4gb-gpu": ("GTX 1650", "RTX 3050 4GB"),
    "6gb-gpu": ("RTX 2060", "RTX 4050 Laptop"),
    "8gb-gpu": ("RTX 3050 8GB",),
    "12gb-gpu": ("RTX 3060 12GB",),
    "16gb-gpu": ("T4",),
    "24gb-gpu": ("A10",),
    "40gb-gpu": ("A100 40GB",),
    "80gb-gpu": ("H100",),
}
QUICK = ("GTX 1650",)  # checkpointing and paged state
PAIRS = [(name, gpu) for name, gpus in SMALLEST_GPUS.items() for gpu in gpus]


@pytest.mark.parametrize(("name", "gpu"), slow_except([one for one in PAIRS if one[1] in QUICK], PAIRS))
def test_bert_large_at_512_tokens_fits_the_smallest_gpus_of_a_preset(name, gpu) -> None:
    chosen = recipe(name)
    assert "(encoders of up to BERT-large's size at 512 tokens; computed" in chosen.purpose
    found = estimate(
        "bert-large-uncased", batch_size=chosen.per_device_train_batch_size, seq_len=512, recipe=chosen, gpu=gpu
    )
    assert found.fits, found.table()
    assert found.settings.gradient_accumulation_steps * found.batch_size == 32


@pytest.mark.parametrize("name", SMALLEST_GPUS)
def test_a_preset_names_known_gpus_of_its_size(name) -> None:
    named = recipe(name).purpose.split(" ...")[0].split(", ")
    for gpu in named:
        assert find_gpu(gpu).memory_bytes >= int(name.removesuffix("gb-gpu")) * 2**30


def test_looking_a_preset_up_loads_neither_the_estimate_nor_the_plan() -> None:
    code = "import sys, hf_memopt; hf_memopt.recipe('4gb-gpu'); print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = (
        "hf_memopt.prediction.memory",
        "hf_memopt.prediction.recipes.planning",
        "hf_memopt.prediction.recipes.running",
        "torch",
        "transformers",
    )
    loaded = [name for name in done.stdout.splitlines() if name.startswith(rooms)]
    assert loaded == []
