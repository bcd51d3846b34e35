"""The search inside ``plan``: its winner is that of an exhaustive search, its verdicts are those of ``estimate``."""

from __future__ import annotations

import io
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console
from tiny_plans import config, gpu_of, planned

from hf_memopt import Plan, estimate
from hf_memopt.components import verdict_of
from hf_memopt.gpus import custom_gpu
from hf_memopt.prediction.memory.recording import keeping_models
from hf_memopt.prediction.recipes.planning import facts_of, print_plan
from hf_memopt.prediction.recipes.planning.choice import best_of, fits_with_ease
from hf_memopt.prediction.recipes.planning.model_and_rows import Texts
from hf_memopt.prediction.recipes.planning.report_figures import settle
from hf_memopt.prediction.recipes.planning.set_ups import ModelFacts, set_ups
from hf_memopt.prediction.recipes.planning.simulated import Candidate, Simulation, priced_on

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CONSENTS = ("release_clipping", "bf16_weights")


def exhaustive(memory: str, batch: int, *, with_ease: bool = False, **options: Any) -> tuple[str, str] | None:
    """Return name and batch of the best of all set-ups of full training with all row counts, each simulated."""
    goal, allow, seq_len = options.get("goal", "speed"), options.get("allow", ()), options.get("seq_len", 64)
    with keeping_models():
        source, task, facts = facts_of(config(layers=options.get("layers", 2), positions=256), None)
        texts = Texts.of(options.get("lengths"), seq_len, batch_size=batch, most=facts.most_tokens, default=seq_len)
        simulation = Simulation(source, task, facts, gpu_of(memory), texts, share=batch, allow=allow)
        every = [
            simulation.of(set_up, rows)
            for set_up in set_ups("full", facts, simulation.gpu, batch)
            if set(set_up.consents) <= set(allow)
            for rows in simulation.row_counts(set_up)
        ]
    assert len(every) > 50
    found = [one for one in every if one is not None]
    if not with_ease:
        return named(best_of(found, goal))
    best = best_of(filter(fits_with_ease, found), goal)
    while best is not None:
        same = [one for one in found if one.rows == best.rows and {*one.techniques} < {*best.techniques}]
        plainer = [one for one in same if one.fits and one.cost <= best.cost]
        if not plainer:
            break
        best = min(plainer, key=lambda one: one.simplicity)
    return named(best)


def named(one: Candidate | None) -> tuple[str, str] | None:
    return None if one is None else (one.name, one.batch)


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("80MiB", 2, {}),
    ("85MiB", 8, {"lengths": [64] * 10 + [8] * 54}),  # alone finds a search that spends the margin
    ("80MiB", 4, {}),
    ("80MiB", 4, {"goal": "memory"}),
    ("90MiB", 4, {"allow": CONSENTS}),
    ("200MiB", 4, {"allow": CONSENTS}),
    ("200MiB", 4, {"goal": "memory", "allow": CONSENTS}),
    ("120MiB", 4, {"layers": 5}),
]
DRAW = random.Random(0)
for _ in range(12):
    drawn = {"goal": DRAW.choice(["speed", "memory"]), "seq_len": DRAW.choice([32, 128])}
    drawn["allow"] = tuple(word for word in CONSENTS if DRAW.random() < 0.3)
    CASES.append((f"{DRAW.randint(68, 160)}MiB", DRAW.choice([3, 4, 6]), drawn))


@pytest.mark.parametrize(
    ("memory", "batch", "options"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])]
)
def test_the_winner_is_that_of_an_exhaustive_search(memory: str, batch: int, options: dict[str, Any]) -> None:
    found = planned(memory, method="full", effective_batch_size=batch, **options).chosen
    assert named(found if found is not None and found.fits else None) == exhaustive(memory, batch, **options)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["90MiB", "100MiB", "120MiB"])
def test_full_training_before_lora_is_the_best_that_fits_with_ease(memory: str) -> None:
    with_ease = exhaustive(memory, 4, with_ease=True)
    found = planned(memory, effective_batch_size=4).chosen
    assert with_ease is None or named(found) == with_ease
    assert (found.stage == "full") is (with_ease is not None)


@pytest.mark.slow
def test_the_longest_rows_are_those_of_an_exhaustive_search() -> None:
    found = planned("90MiB", method="full", goal="longest").chosen
    assert named(found) == exhaustive("90MiB", 2, seq_len=found.seq_len)
    assert exhaustive("90MiB", 2, seq_len=found.seq_len + 8) is None


@pytest.fixture(scope="module")
def found() -> Plan:
    lengths = [64] * 30 + [8] * 70
    return planned("80MiB", method="full", lengths=lengths, seq_len=None, effective_batch_size=4)


@pytest.mark.slow
def test_random_verdicts_are_those_of_a_direct_estimate(found: Plan) -> None:
    assert len(found.candidates) > 30  # fewer with transformers 5.8, which keeps no checkpoints in host memory
    for one in random.Random(0).sample(found.candidates, 20):
        steps = {"gradient_accumulation_steps": one.recipe.effective_batch_size // one.rows}
        asked = {"batch_size": one.rows, "seq_len": one.seq_len, "recipe": one.recipe, "gpu": found.gpu}
        itself = estimate(config(positions=256), **asked, **steps)
        assert (one.total_bytes, one.components) == (itself.total_bytes, itself.components)
        assert (one.verdict != "over") is itself.fits
        assert one.spare_bytes == found.gpu.usable_bytes - itself.total_bytes


def test_verdicts_have_colours_in_a_terminal_alone(found: Plan) -> None:
    def printed(**options: Any) -> str:
        file = io.StringIO()
        print_plan(found, Console(file=file, width=80, **options))
        return file.getvalue()

    plain = printed()  # to a file
    assert plain == f"{found.table(80)}\n"
    terminal = {"force_terminal": True, "color_system": "standard"}
    coloured = printed(**terminal).splitlines()
    # rich 13 ends the colour of a line at the beginning of the next
    assert [line for line in coloured if "\33[1;32m > full fine-tuning" in line]
    assert [line for line in coloured if "\33[1;32mFITS with full fine-tuning" in line]
    assert [line for line in coloured if "\33[31m x full fine-tuning" in line]
    assert re.sub("\33\\[[01]m", "", printed(**terminal, no_color=True)) == plain  # bold is no colour


# ---- The order of set-ups

GPU = custom_gpu("8GB", "8.6")


def test_every_set_up_is_known_by_its_techniques_and_follows_its_plainer_ones() -> None:
    for stage in ("full", "freeze", "lora", "qlora"):
        every = list(set_ups(stage, ModelFacts("causal-lm", is_tied=True, layers=2), GPU, 8))
        places = {one.techniques: place for place, one in enumerate(every)}
        assert len(places) == len(every)
        for place, one in enumerate(every):
            assert all(places[plain] < place for plain in one.plainer), one.name
            assert all(every[places[plain]].simplicity <= one.simplicity for plain in one.plainer), one.name


def test_of_equally_fast_set_ups_the_first_in_this_order_wins() -> None:
    every = list(set_ups("full", ModelFacts("masked-lm", is_tied=True, layers=2), GPU, 8))
    simplicity = {one.name.removeprefix("full, "): one.simplicity for one in every if not one.consents}
    order = [
        "fp32",
        "bf16",
        "bf16, checkpointing",
        "bf16, 8-bit AdamW",
        "bf16, 8-bit AdamW, checkpointing",
        "bf16, expandable segments",
        "bf16, 8-bit AdamW, checkpointing, expandable segments",
        "bf16, AdamW state on the host",
        "bf16, AdamW state on the host, checkpointing, expandable segments",
        "bf16, 8-bit AdamW state on the host",
        "bf16, offload",
        "bf16, 8-bit AdamW state on the host, offload, expandable segments",
    ]
    assert all(simplicity[one] < simplicity[other] for one, other in pairwise(order))
    assert max(simplicity.values()) < min(one.simplicity for one in every if one.consents)


@pytest.mark.parametrize("task", ["masked-lm", "sequence-classification"])
def test_a_set_up_has_no_reason_for_what_it_leaves_off(task: str) -> None:
    is_language_model = task == "masked-lm"
    for stage in ("full", "lora"):
        for one in set_ups(stage, ModelFacts(task, is_tied=True, layers=2), GPU, 8):
            used = {"sparse_tied_embedding": stage == "full", "fused_cross_entropy": True, "prediction_loss_only": True}
            assert one.recipe.prediction_loss_only is is_language_model
            assert one.with_rows(4).per_device_eval_batch_size == (4 if is_language_model else 8)
            for name, value in used.items():
                assert (name in one.recipe.reasons) is (value and is_language_model), (stage, name)


def test_of_a_gpu_without_known_rates_the_nearest_one_ranks_set_ups() -> None:
    for capability, nearest in (("8.6", (8, 6)), ("8.7", (8, 6)), ("12.1", (12, 0)), ("5.2", (6, 0))):
        assert priced_on(custom_gpu("8GB", capability)).compute_capability == nearest
    assert priced_on(custom_gpu("11GB", "8.6")).name == "RTX 3060 12GB"


# ---- What fits at other lengths and batches


@pytest.mark.parametrize("seed", range(20))
def test_settled_verdicts_are_those_of_a_full_simulation(seed: int) -> None:
    draw = random.Random(seed)
    rows, lengths = [2**power for power in range(draw.randint(1, 7))], [64 * 2**power for power in range(6)]
    per_token, room = draw.uniform(0.1, 2), draw.uniform(1, 5000)
    margin = int(room / 20)
    asked = set()

    def spare(count: int, length: int | None) -> int:
        asked.add((count, length))
        return int(room - 10 - per_token * count * length)

    found = settle(rows, lengths, spare, margin)
    assert len(asked) <= 2 * (len(rows) + len(lengths))
    for count, verdicts in zip(rows, found, strict=True):
        assert verdicts == [verdict_of(spare(count, length), margin) for length in lengths]
