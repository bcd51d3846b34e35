"""``plan``: its verdicts are those of ``estimate``, its winner is that of an exhaustive search, it says why."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset

import tiny
from hf_memopt import Plan, custom_gpu, estimate, plan
from hf_memopt.memory.recording.kept_models import keeping_models
from hf_memopt.memory.recording.trace_cache import forget_traces
from hf_memopt.recipes.planning.candidates import Candidate
from hf_memopt.recipes.planning.model_facts import facts_of
from hf_memopt.recipes.planning.reasons import with_reasons
from hf_memopt.recipes.planning.request import Texts
from hf_memopt.recipes.planning.search import best_of, row_counts
from hf_memopt.recipes.planning.set_ups import set_ups
from hf_memopt.recipes.planning.simulation import Simulation
from hf_memopt.units import parse_bytes

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 4000}
CONSENTS = ("release_clipping", "bf16_weights")


def config() -> transformers.LlamaConfig:
    return tiny.llama_config(**SIZES, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256)


def gpu_of(memory: str) -> Any:
    """Return a GPU with so much for torch's allocator, beside a context."""
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes
    return custom_gpu(parse_bytes(memory) + context_bytes, "8.6", name=f"a GPU with {memory}")


def planned(memory: str, **options: Any) -> Plan:
    options = {"seq_len": 64, "effective_batch_size": 8, **options}
    return plan(config(), gpu=gpu_of(memory), **options)


def estimated(one: Candidate, gpu: Any, world_size: int = 1) -> Any:
    steps = one.recipe.effective_batch_size // (one.rows * world_size)
    return estimate(
        config(),
        batch_size=one.rows,
        seq_len=one.seq_len,
        recipe=one.recipe,
        gpu=gpu,
        gradient_accumulation_steps=steps,
    )


@pytest.fixture(scope="module")
def found() -> Plan:
    return planned("80MiB", method="full", lengths=[64] * 30 + [8] * 70, seq_len=None)


def test_random_verdicts_are_those_of_a_direct_estimate(found: Plan) -> None:
    assert len(found.candidates) > 40
    gpu = gpu_of("80MiB")
    forget_traces()
    for one in random.Random(0).sample(found.candidates, 20):
        itself = estimated(one, gpu)
        assert one.total_bytes == itself.total_bytes
        assert one.components == itself.components
        assert (one.verdict != "over") is itself.fits
        assert one.spare_bytes == gpu.usable_bytes - itself.total_bytes


@pytest.mark.parametrize(
    ("memory", "goal", "allow"),
    [
        ("80MiB", "speed", ()),
        pytest.param("80MiB", "memory", (), marks=pytest.mark.slow),
        pytest.param("90MiB", "speed", CONSENTS, marks=pytest.mark.slow),
        pytest.param("200MiB", "speed", CONSENTS, marks=pytest.mark.slow),
        pytest.param("200MiB", "memory", CONSENTS, marks=pytest.mark.slow),
    ],
)
def test_the_winner_is_that_of_an_exhaustive_search(memory: str, goal: str, allow: tuple[str, ...]) -> None:
    gpu = gpu_of(memory)
    found = planned(memory, goal=goal, method="full", allow=allow, effective_batch_size=4)
    with keeping_models():
        source, task, facts, _, _ = facts_of(config(), None)
        simulation = Simulation(source, task, gpu, Texts(64), 1, allow)
        every = [
            simulation.of(set_up, rows)
            for set_up in set_ups("full", facts, gpu, 4)
            if set(set_up.consents) <= set(allow)
            for rows in row_counts(set_up, 4)
        ]
    best = best_of([one for one in every if one is not None], goal)
    assert best is not None
    assert found.chosen is not None
    assert (found.chosen.name, found.chosen.batch) == (best.name, best.batch)
    assert found.simulations < len(every)


def test_checkpointing_at_micro_batch_1_buys_nothing_on_ladder_a() -> None:
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model = transformers.BertConfig(**large, vocab_size=21128)
    with keeping_models():
        source, task, facts, _, _ = facts_of(model, None)
        gpu = custom_gpu("8GiB", "7.0")
        simulation = Simulation(source, task, gpu, Texts(128))
        wanted = {"full, fp32", "full, fp32, checkpointing"}
        found = [simulation.of(one, 1) for one in set_ups("full", facts, gpu, 32) if one.name in wanted]
    without, with_it = [one for one in found if one is not None]
    assert with_it.seconds is not None
    assert without.seconds is not None
    assert with_it.seconds > 1.2 * without.seconds
    assert best_of([without, with_it]) is without
    refused = with_reasons([without, with_it], without, "speed")[1].reason
    assert refused.startswith("checkpointing buys nothing: without it 1 x 32 fits too; it frees ")
    assert "that nothing needs, for 1." in refused


def test_released_gradients_need_consent_and_the_batch_as_one() -> None:
    asked = planned("72MiB", method="full", effective_batch_size=2)
    assert asked.chosen is None or asked.chosen.verdict == "tight"
    needing = [one for one in asked.candidates if one.consents]
    assert {one.consents for one in needing} >= {("release_clipping",), ("bf16_weights",)}
    released = [one for one in needing if "release_clipping" in one.consents]
    assert all((one.rows, one.accumulation_steps) == (2, 1) for one in released)
    fitting = [one for one in needing if one.verdict == "fits"]
    assert fitting
    assert "; needs your consent: allow=(" in fitting[0].reason
    assert f"? With your consent, allow={fitting[0].consents[0]}: {fitting[0].name}" in asked.table(300)
    allowed = planned("72MiB", method="full", effective_batch_size=2, allow=fitting[0].consents)
    assert allowed.chosen is not None
    assert allowed.chosen.fits
    assert set(allowed.recipe.reasons) >= {"checkpointing", "optim", "per_device_train_batch_size"}


@pytest.mark.parametrize(
    ("memory", "stage", "says"),
    [
        pytest.param("500MiB", "full", "", marks=pytest.mark.slow),
        ("66MiB", "lora", "full training does not fit with 5 % to spare, so LoRA was chosen"),
        pytest.param(
            "64MiB",
            "qlora",
            "neither full training nor LoRA fits with 5 % to spare, so QLoRA was chosen",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_auto_climbs_its_ladder_and_says_so(memory: str, stage: str, says: str) -> None:
    found = planned(memory)
    assert found.chosen is not None, str(found)
    assert found.chosen.stage == stage
    assert not says or says in found.notes
    assert found.recipe is found.chosen.recipe
    assert found.chosen.spare_bytes >= found.chosen.margin_bytes


def test_where_nothing_fits_it_says_what_would() -> None:
    found = planned("14MiB", method="full")
    assert (found.fits, found.chosen) == (False, None)
    short = found.shortfall
    assert short is not None
    assert short.lacks_bytes == -short.nearest.spare_bytes > 0
    assert short.gpu
    assert 0 < short.parameters < found.parameters
    assert "Nothing fits. The nearest: " in str(found)
    with pytest.raises(ValueError, match="has no plan that fits a GPU with 14MiB; expected one that does"):
        _ = found.recipe


@pytest.mark.slow
def test_shorter_rows_are_used_only_where_nothing_else_fits() -> None:
    longer = {"seq_len": 256, "effective_batch_size": 4, "method": "full", "allow": ("shorter", *CONSENTS)}
    assert planned("300MiB", **longer).texts.seq_len == 256
    cut = planned("62MiB", **{**longer, "allow": "shorter"})
    assert cut.texts.seq_len in (128, 64)
    assert cut.fits


def test_time_is_that_of_the_mean_padded_length() -> None:
    lengths = np.random.default_rng(0).integers(8, 129, size=400)
    gpu = "RTX 3060 12GB"
    found = plan(config(), gpu=gpu, lengths=lengths, effective_batch_size=8, method="full")
    assert not found.notes
    one = found.chosen
    assert one is not None
    assert found.texts.seq_len == 128
    assert found.texts.rows == 400
    ordered = np.sort(lengths)
    widths = [-(-int(ordered[first : first + 8].max()) // 8) * 8 for first in range(0, 400, 8)]
    times = {
        width: estimate(config(), batch_size=one.rows, seq_len=width, recipe=one.recipe, gpu=gpu).step_time
        for width in sorted(set(widths))[::4]
    }
    mean = float(np.interp(widths, list(times), [time.seconds for time in times.values()]).mean())
    assert one.seconds == pytest.approx(mean, rel=0.03)
    longest = estimate(config(), batch_size=one.rows, seq_len=128, recipe=one.recipe, gpu=gpu)
    assert one.total_bytes == longest.total_bytes
    assert longest.step_time.seconds >= one.seconds


@pytest.mark.slow
def test_the_longest_rows_are_the_longest_that_fit() -> None:
    found = planned("90MiB", goal="longest", method="full")
    assert found.chosen is not None
    assert found.chosen.seq_len is not None
    assert found.chosen.seq_len % 8 == 0
    longer = planned("90MiB", method="full", seq_len=found.chosen.seq_len + 8)
    assert longer.chosen is None or longer.chosen.verdict == "tight"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_is_as_wide_as_the_terminal(found: Plan, width: int) -> None:
    text = found.table(width)
    assert max(map(len, text.splitlines())) <= width
    assert " > " in text
    assert ("epoch*" in text) is (width >= 76)


def test_json_has_every_candidate_with_bytes_seconds_verdict_and_reason(found: Plan) -> None:
    told = json.loads(found.to_json())
    assert told["fits"] is True
    assert len(told["candidates"]) == len(found.candidates)
    for one in told["candidates"]:
        assert one["verdict"] in ("fits", "tight", "over")
        assert one["reason"]
        assert one["seconds"] > 0
        assert sum(one["components"].values()) > 0
        assert one["total_bytes"] == one["reserved_bytes"] + one["context_bytes"]


BAD = [
    ({"goal": "fast"}, "goal='fast' is unknown; expected one of 'speed', 'memory', 'longest'. Pass goal='speed'"),
    ({"method": "adapter"}, "method='adapter' is unknown; expected one of 'auto', 'full', 'lora', 'qlora'."),
    ({"allow": "bf16_weight"}, "Did you mean 'bf16_weights'?"),
    ({"allow": ("freeze",), "method": "lora"}, "allow=('freeze',), method='lora' contradict each other"),
    ({"effective_batch_size": 10, "world_size": 4}, "effective_batch_size=10 cannot be cut over world_size=4 GPUs"),
    ({"allow": "release_clipping", "world_size": 2}, "world_size=2 contradict each other: released gradients would"),
    ({"effective_batch_size": 0}, "effective_batch_size=0 "),
    ({"lengths": [8, 600]}, "lengths=<longest 600> are beyond the 256 positions of the model; expected 1 to 256."),
    ({"lengths": []}, "are no lengths of examples; expected whole numbers from 1 on"),
    ({"budget": "100GiB"}, "budget='100GiB' is more than the "),
    ({"measured": "run.json"}, "measured='run.json' cannot be read: No such file or directory; expected a file that"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        plan(config(), gpu="RTX 3060 12GB", **options)
    assert message in str(error.value)


def test_a_budget_below_the_weights_is_refused() -> None:
    gpu = gpu_of("150MiB")
    with pytest.raises(ValueError, match="is below the weights of LlamaForCausalLM, which take "):
        plan(config(), gpu=gpu, budget=gpu.context_bytes + 2**20, seq_len=64, method="full")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpu", "seconds", "options"),
    [
        ("bert-large-uncased", "RTX 4060", 10, {"allow": CONSENTS}),
        ("Llama-3.1-8B", "RTX 3060 12GB", 20, {}),
    ],
)
def test_the_search_is_fast(model: str, gpu: str, seconds: float, options: dict[str, Any]) -> None:
    forget_traces()
    estimate("bert-base-uncased", gpu=gpu, lora=16, load_in="nf4", seq_len=8)  # imports
    start = time.process_time()
    found = plan(model, gpu=gpu, seq_len=512, **options)
    assert time.process_time() - start <= seconds
    assert found.fits
    if model.startswith("bert"):
        assert len(found.candidates) >= 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpu", "batch", "most_gib"),
    [
        ("Llama-3.2-1B", "RTX 3050 4GB", 2, 3.62),
        ("Llama-3.2-3B", "RTX 3060 12GB", 8, 11.2),
        ("Llama-3.1-8B", "RTX 3090", 8, 18.5),
    ],
)
def test_the_largest_full_fine_tuning_of_a_gpu(model: str, gpu: str, batch: int, most_gib: float) -> None:
    found = plan(model, gpu=gpu, seq_len=512, effective_batch_size=batch, method="full", allow=CONSENTS)
    assert found.chosen is not None
    assert found.chosen.fits
    assert found.chosen.recipe.lora is None
    assert found.chosen.recipe.freeze == ()
    assert found.chosen.recipe.gradient_release
    assert found.chosen.total_bytes <= most_gib * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "allow"), [("full", ()), ("lora", ()), ("full", ("bf16_weights",)), ("full", ("freeze",))]
)
def test_a_planned_recipe_trains_on_a_cpu(tmp_path: Any, method: str, allow: tuple[str, ...]) -> None:
    model = transformers.LlamaForCausalLM(config())
    memory = "72MiB" if allow == ("bf16_weights",) or method == "lora" else "200MiB"
    found = planned(memory, method=method, allow=allow, effective_batch_size=4)
    recipe = found.recipe
    if recipe.weights_dtype == "bfloat16":
        model = model.to(torch.bfloat16)
    rows = [{"input_ids": [5 + number] * (8 + number)} for number in range(8)]
    trainer = recipe.trainer(
        model=model,
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
        training_arguments={
            **{"output_dir": str(tmp_path), "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
            **{"use_cpu": True, "max_steps": 1},
            **({"optim": "adamw_torch"} if "8bit" in recipe.optim or "paged" in recipe.optim else {}),
        },
    )
    assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 4
    assert trainer.train().global_step == 1
