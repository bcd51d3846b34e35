"""Table, verdict and JSON of an estimate, on estimates made by hand."""

from __future__ import annotations

import importlib.metadata
import io
import json
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from rich.console import Console

from hand_made import MIB, SMALL, hand_made
from hf_memopt import Estimate, __version__
from hf_memopt.components import COMPONENTS, parts_of
from hf_memopt.prediction.memory.output import print_estimate
from hf_memopt.techniques import freeze


def set_up(found: Estimate) -> str:
    """Return the first sentence of a table, before it is wrapped."""
    return " ".join(takewhile(lambda line: " parameters" not in line, found.table().splitlines()))


def verdict(found: Estimate) -> str:
    """Return the sentence before the table, which follows that on the parameters."""
    return found.table().partition("\n\n")[0].partition(" trainable\n")[2].replace("\n", " ")


def test_the_whole_table() -> None:
    found = hand_made(
        settings={"gradient_accumulation_steps": 4, "attn_implementation": "sdpa"},
        host_bytes=3 * MIB,
        trainable_parameters=1_050_626,
        notes=("batches hold padding", "the context is the table's"),
    )
    assert found.table() == (
        "bert-large: batch 32 x 128, 4 accumulation steps, fp32, adamw_torch_fused, sdpa\n"
        "attention\n"
        "335 M parameters, 1.05 M trainable\n"
        "FITS GPU 4GB: 1.99 of 3.80 GiB, 1.81 GiB free\n"
        "\n"
        " component                 memory    share\n"
        " ───────────────────────────────────────────────────\n"
        " weights                600.0 MiB   29.5 %   ██████\n"
        " gradients               75.0 MiB    3.7 %   █\n"
        " optimizer state        150.0 MiB    7.4 %   █\n"
        " activations            700.0 MiB   34.4 %   ███████\n"
        " logits and loss         50.0 MiB    2.5 %\n"
        " temporaries             33.0 MiB    1.6 %\n"
        " workspace               16.0 MiB    0.8 %\n"
        " reserved, not in use     8.0 MiB    0.4 %\n"
        " CUDA context           400.0 MiB   19.7 %   ████\n"
        "\n"
        " total                   1.99 GiB\n"
        "\n"
        "Peak     in the backward phase, at bert.encoder.layer.23, where most is\n"
        "         allocated\n"
        "Reserved load 624.0 MiB, forward 1.49 GiB, backward 1.59 GiB, optimizer 1.59\n"
        "         GiB, evaluation 1.59 GiB\n"
        "Host     3.0 MiB are moved to host memory\n"
        "Speed    7.6 TFLOP per optimizer step\n"
        "Note     batches hold padding\n"
        "Note     the context is the table's\n"
        "Trust    simulated, not measured on a GPU; an estimate may be 5 % of the GPU off"
    )


def test_the_phase_that_reserves_most_decides_the_total_and_its_parts_add_up() -> None:
    timeline = hand_made().timeline
    reserved = np.concatenate([timeline.reserved[:-1], timeline.reserved[-1:] + 100 * MIB])  # fragments in evaluation
    at_peak = dict(zip(COMPONENTS, timeline.components[-1].tolist(), strict=True))
    found = hand_made(
        timeline=replace(timeline, reserved=reserved),
        peak_reserved_bytes=int(reserved.max()),
        components=at_peak,
        phase="evaluation",
        module="",
    )
    text = found.table()
    said = "Peak     in the evaluation phase, where the allocator reserves more than for the"
    assert f"{said}\n         1.59 GiB of the backward phase\n" in text
    assert " reserved, not in use   866.0 MiB   40.6 %" in text
    parts = parts_of(found.components, found.peak_reserved_bytes, found.context_bytes)
    assert sum(parts.values()) == found.total_bytes


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_phase_is_cut_in_a_narrow_terminal(columns) -> None:
    console = Console(width=columns, file=io.StringIO())
    print_estimate(hand_made(), console, verbose=True)
    text = console.file.getvalue()
    assert "…" not in text
    for name in hand_made().phases:
        assert f" {name} " in text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "fp32, adamw_torch_fused"),
        (
            {"precision": "bf16", "optim": "adamw_8bit", "embedding_bits": 8, "checkpointing": True},
            "bf16, adamw_8bit with 8-bit embeddings, checkpointing",
        ),
        (
            {"weights_dtype": "bfloat16", "micro_batch_size": 4, "checkpointing": {"every_n_layers": 2}},
            "micro-batches of 4, fp32 with bfloat16 weights, adamw_torch_fused, checkpointing(every_n_layers=2)",
        ),
        (
            {"gradient_release": True, "max_grad_norm": 0, "eval_batch_size": 8, "expandable_segments": True},
            "fp32, adamw_torch_fused, gradient release, evaluation batch 8, expandable segments",
        ),
        (
            {"prepare": (partial(freeze, patterns=("base",)), partial(freeze, None, "embeddings"), len)},
            "fp32, adamw_torch_fused, freeze(patterns=('base',)), freeze(None, 'embeddings'), len",
        ),
        (
            {"lora": 16, "load_in": "nf4", "weights_dtype": "bfloat16", "freeze": ("embeddings", "layers:0")},
            "fp32 with bfloat16 weights, nf4 linears, LoRA(r=16), frozen: embeddings, layers:0, adamw_torch_fused",
        ),
        (
            {"lora": LoraConfig(r=4, target_modules=["query"])},
            "fp32, LoRA(r=4, target_modules={'query'}), adamw_torch_fused",
        ),
        (
            {"weights_dtype": "bfloat16", "rounding": "kahan"},
            "fp32 with bfloat16 weights, adamw_torch_fused, kahan rounding",
        ),
        ({"checkpointing": {"context_fn": freeze}}, "fp32, adamw_torch_fused, checkpointing(context_fn=freeze)"),
    ],
)
def test_the_set_up_in_one_line(settings, text) -> None:
    assert set_up(hand_made(settings=settings)) == f"bert-large: batch 32 x 128, {text}"


def test_adapters_are_counted_apart() -> None:
    found = hand_made(settings={"lora": 16}, parameters=8_072_204_288, trainable_parameters=41_943_040)
    assert found.table().splitlines()[1] == ("8.03 B parameters, 41.9 M trainable in adapters")


TOO_SMALL = replace(SMALL, usable_bytes=1000 * MIB)
LARGEST = "most are activations, 700.0 MiB"
NAME_ONE = "name a GPU to see whether it fits, for example gpu='RTX 3050 4GB'"
TOTAL = hand_made().total_bytes


def on(usable_bytes: int) -> dict[str, Any]:
    return {"gpu": replace(SMALL, usable_bytes=usable_bytes)}


VERDICTS: list[tuple[dict[str, Any], str | None, bool | None, str]] = [
    (on(20 * TOTAL // 19 + 20), "fits", True, "FITS GPU 4GB: 1.99 of 2.09 GiB, 107.0 MiB free"),
    (
        on(TOTAL),
        "tight",
        True,
        "TOO CLOSE TO TELL on GPU 4GB: 1.99 of 1.99 GiB, 0 B free, and an estimate may be 5 % of the GPU off; "
        f"{LARGEST}",
    ),
    (on(TOTAL - 1), "over", False, f"DOES NOT FIT GPU 4GB: 1.99 of 1.99 GiB, 1 B too much; {LARGEST}"),
    ({"gpu": TOO_SMALL}, "over", False, f"DOES NOT FIT GPU 4GB: 1.99 of 0.98 GiB, 1.01 GiB too much; {LARGEST}"),
    (
        {"context_bytes": None},
        "fits",
        True,
        "FITS GPU 4GB: 1.59 (and CUDA's context, whose size is unknown) of 3.80 GiB, 2.21 GiB free",
    ),
    ({"gpu": None}, None, None, f"NEEDS 1.99 GiB; {NAME_ONE}"),
    ({"gpu": None, "context_bytes": None}, None, None, f"NEEDS 1.59 GiB and CUDA's context; {NAME_ONE}"),
]


@pytest.mark.parametrize(("changed", "word", "fits", "text"), VERDICTS)
def test_the_verdict(changed: dict[str, Any], word: str | None, fits: bool | None, text: str) -> None:
    found = hand_made(**changed)
    assert (found.verdict, found.fits, verdict(found)) == (word, fits, text)


def test_what_does_not_fit_ends_with_what_to_type() -> None:
    found = hand_made(gpu=TOO_SMALL)
    assert found.table().splitlines()[-1] == (
        "Next     plan(model, gpu='GPU 4GB', seq_len=128, effective_batch_size=32)"
    )


def test_json_says_everything_in_bytes() -> None:
    prepare = (partial(freeze, patterns=("base",)),)
    found = hand_made(settings={"prepare": prepare, "checkpointing": {"context_fn": freeze}}, notes=("a note",))
    read = json.loads(found.to_json())
    assert read["settings"]["prepare"] == ["freeze(patterns=('base',))"]
    assert read["settings"]["checkpointing"] == {"context_fn": "freeze"}
    lora = LoraConfig(r=4, target_modules=["query", "key"], task_type="CAUSAL_LM")
    adapted = json.loads(hand_made(settings={"lora": lora, "load_in": "int8", "freeze": "base"}).to_json())
    chosen = {"r": 4, "target_modules": ["key", "query"], "task_type": "CAUSAL_LM"}
    assert adapted["settings"]["lora"] == chosen
    assert (adapted["settings"]["load_in"], adapted["settings"]["freeze"]) == ("int8", ["base"])
    assert read["settings"]["precision"] == "fp32"
    assert read["components"] == found.components
    assert list(read["components"]) == list(COMPONENTS)
    assert read["phase_components"]["backward"] == found.components
    assert read["gpu"] == {**asdict(SMALL), "compute_capability": [8, 6], "notes": [], "bf16": True}
    assert (read["gpu"]["name"], read["gpu"]["usable_bytes"]) == ("GPU 4GB", 3891 * MIB)
    assert read["versions"] == {
        "hf-memopt": __version__,
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
    }
    same = ("model", "batch_size", "seq_len", "peak_allocated_bytes", "peak_reserved_bytes", "context_bytes", "phase")
    same += ("module", "host_bytes", "parameters", "trainable_parameters", "flops", "total_bytes", "fits", "verdict")
    assert {name: read[name] for name in same} == {name: getattr(found, name) for name in same}
    assert read["notes"] == ["a note"]
    assert set(read) == {
        *(*same, "settings", "gpu", "components", "notes", "phase_peaks", "versions", "fragmentation"),
        *("step_time", "time_unknown", "unused_parameters", "format", "phase_components"),
    }
    alone = json.loads(hand_made(gpu=None, context_bytes=None).to_json())
    assert (alone["gpu"], alone["context_bytes"], alone["fits"]) == (None, None, None)
