"""Which plan wins: the order of nearly equal ones, full training or LoRA, and what an operating system leaves out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import tiny
from hf_memopt import Plan, custom_gpu, plan
from hf_memopt.recipes.planning.output import shown_candidates
from hf_memopt.recipes.planning.search import fits_with_ease
from hf_memopt.recipes.planning.set_ups import LINUX_ONLY, ModelFacts, set_ups
from hf_memopt.units import parse_bytes

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def planned(memory: str, *, name: str = "", **options: Any) -> Plan:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 4000}
    model = tiny.llama_config(**sizes, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128)
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes
    assert context_bytes is not None
    gpu = custom_gpu(parse_bytes(memory) + context_bytes, "8.6", name=name or f"a GPU with {memory}")
    return plan(model, gpu=gpu, seq_len=64, effective_batch_size=2, **options)


# ---- Of nearly equal ones


def test_of_equally_fast_set_ups_the_first_in_this_order_wins() -> None:
    every = set_ups("full", ModelFacts("masked-lm", is_tied=True, layers=2), custom_gpu("8GB", "8.6"), 8)
    simplicity = {one.name.removeprefix("full, "): one.simplicity for one in every if not one.consents}
    order = [
        "fp32",
        "bf16",
        "bf16, checkpointing",
        "bf16, 8-bit AdamW",
        "bf16, 8-bit AdamW, checkpointing",
        "bf16, expandable segments",
        "bf16, 8-bit AdamW, checkpointing, expandable segments",
        "bf16, paged AdamW",
        "bf16, paged AdamW, checkpointing, expandable segments",
        "bf16, paged 8-bit AdamW",
        "bf16, offload",
        "bf16, paged 8-bit AdamW, offload, expandable segments",
    ]
    assert all(simplicity[one] < simplicity[other] for one, other in pairwise(order))


def test_what_changes_the_training_or_asks_is_never_the_simpler() -> None:
    every = list(set_ups("full", ModelFacts("causal-lm", is_tied=True, layers=2), custom_gpu("8GB", "8.6"), 8))
    asking = [one.simplicity for one in every if one.consents]
    assert asking
    assert max(one.simplicity for one in every if not one.consents) < min(asking)


# ---- Full training or LoRA


@pytest.mark.parametrize(
    "memory",
    [
        "74MiB",
        "130MiB",
        *(pytest.param(f"{size}MiB", marks=pytest.mark.slow) for size in range(66, 130, 6) if size != 74),
    ],
)
def test_full_training_is_recommended_where_it_fits_with_ease(memory: str) -> None:
    found = planned(memory)
    assert found.chosen is not None
    full = [one for one in found.candidates if one.stage == "full"]
    assert (found.chosen.stage == "full") is any(map(fits_with_ease, full))
    assert found.chosen.stage != "full" or fits_with_ease(found.chosen)
    shown = shown_candidates(found)
    assert any(one.stage == "lora" for one in shown)
    harder = [one for one in full if one.fits]
    assert not harder or any(one.stage == "full" and one.fits for one in shown)
    if found.chosen.stage == "lora" and harder:
        [note] = [one for one in found.notes if "method='full'" in one]
        assert note.startswith(("full training needs ", "full training leaves "))
        assert note.endswith(" x the time of the chosen: LoRA was chosen; method='full' plans it")


# ---- Operating systems


def test_a_laptop_has_a_desktop_and_may_have_windows() -> None:
    found = planned("2GiB", name="RTX 1 Laptop", method="full")
    whole = found.gpu.memory_bytes
    assert found.gpu.usable_bytes == whole - 2**29
    assert found.notes[-2:] == (
        "planned for Windows, where neither expandable segments nor paged state work; os='linux' plans with them",
        f"512.0 MiB of RTX 1 Laptop are left to the desktop; budget='{whole // 2**20}MiB' plans with all of it",
    )
    assert planned("2GiB", name="RTX 1 Laptop", method="full", budget=2**30).gpu.usable_bytes == 2**30


@pytest.mark.parametrize("system", ["linux", "windows", pytest.param("wsl", marks=pytest.mark.slow)])
def test_what_does_not_work_on_a_system_is_left_out(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.recipes.planning.request.DESKTOP_BYTES", 0)
    found = planned("76MiB", os=system, method="full")
    used = {technique for one in found.candidates for technique in one.techniques}
    assert bool(used & {*LINUX_ONLY}) is (system == "linux")
    assert ("os='linux'" in str(found)) is False  # it was asked for
    assert f"os='{system}'" in found.to_json()


def test_what_works_on_linux_alone_is_told_where_it_is_used() -> None:
    found = planned("72MiB", method="full")
    assert found.chosen is not None
    used = [one.name for one in found.chosen.techniques if one in LINUX_ONLY]
    told = [f"{name} works on Linux alone, as this machine has it; os='windows' plans without it" for name in used]
    assert used
    assert found.notes[-len(told) :] == tuple(told)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ValueError, match="os='win' is unknown; expected one of 'linux', 'windows', 'wsl'"):
        planned("80MiB", os="win")
