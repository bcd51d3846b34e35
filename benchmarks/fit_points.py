"""Simulate what every well-known model needs: the points of ``docs/does-it-fit.html`` (``fit_data.py`` writes it).

Each model is asked for four methods: full, LoRA, QLoRA, and LoRA with layers that wait in host memory. All have
checkpointing and, for language models, the fused loss. One recording serves all GPUs of a kind of kernels.
Three lengths are recorded, and between them bytes and operations are polynomials of the length: of each moment of a
step, and of each operation, not of their peaks and seconds. Only the logits of the fused loss are not, as it cuts the
rows into chunks: they are a line over the rows of a chunk.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import log2, sqrt
from operator import mul
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from fit_moments import Row, components_at, first_near, pieces_of, weights_at

from hf_memopt import Estimate, NotEstimableError, estimate
from hf_memopt.components import COMPONENTS, CONTEXT, UNUSED
from hf_memopt.gpus import GPUS, Gpu, find_gpu
from hf_memopt.prediction.memory.cuda import workspace_bytes
from hf_memopt.prediction.memory.estimation import precision_for
from hf_memopt.prediction.memory.models import default_length, known_models, load_model, most_tokens
from hf_memopt.prediction.memory.recording import keeping_models
from hf_memopt.prediction.memory.settings import ROW_TOKENS
from hf_memopt.prediction.memory.step_time import Operation, StepCosts
from hf_memopt.prediction.memory.tracking import Timeline
from hf_memopt.training.binding.model import head_for, task_of
from hf_memopt.training.binding.model_changes import tied_embeddings
from hf_memopt.training.devices import against_float16

METHODS = {
    "full": {},
    "lora": {"lora": 16},
    "qlora": {"lora": 16, "load_in": "nf4"},
    "streamed": {"lora": 16, "streamed": True},
}
TITLES = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA", "streamed": "LoRA, layers in RAM"}
EFFECTIVE_BATCH = 8
LONGEST = 4096
STEPS_OF_AN_OCTAVE = 1.5
INPUTS = COMPONENTS.index("inputs")
STREAMED_FROM = 1e9  # parameters: LoRA of a smaller model fits with all its layers on the GPU
TOKEN_BY_TOKEN = {"mamba"}  # in transformers' own code: thousands of operations a token, hours of recording a model
NOT_SIZES = {
    "rope_parameters",
    "rope_theta",
    "max_position_embeddings",
    "initializer_range",
    "transformers_version",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
}
LARGER_WORKSPACES_BYTES = sum(workspace_bytes((9, 0))) - sum(workspace_bytes((8, 6)))


@dataclass(frozen=True)
class Kernels:
    """GPUs that run the same kernels, and the one that stands for them."""

    name: str
    simulated_on: str

    @property
    def gpus(self) -> list[str]:
        """The names of these GPUs, of NVIDIA, with tensor cores for 16 bits."""
        return [name for name, gpu in GPUS.items() if kernels_of(gpu) is self]


BFLOAT16 = Kernels("bf16", "RTX 3090")
FLOAT16 = Kernels("fp16", "T4")
KERNELS = (BFLOAT16, FLOAT16)


def kernels_of(gpu: Gpu) -> Kernels | None:
    """Return the kernels that a GPU runs; None for AMD's, those without tensor cores and B200, which no row has."""
    if (
        gpu.context_bytes is None
        or gpu.compute_capability[0] == 10
        or against_float16(gpu.name)
        or gpu.compute_capability < (7, 0)
    ):
        return None
    return BFLOAT16 if gpu.bf16 else FLOAT16


def has_large_workspace(gpu: Gpu) -> bool:
    """Return whether cuBLAS takes 32 MiB for a handle on a GPU, in place of 8."""
    return gpu.compute_capability >= (9, 0)


@dataclass(frozen=True)
class Subject:
    """A well-known model, and the rows that it is asked for."""

    name: str
    task: str
    rows: int  # of a micro-batch: stock's default, or one row of a language model
    lengths: tuple[int | None, ...]  # that are simulated first, ascending; (None,) for a model without text

    @classmethod
    def of(cls, name: str) -> Subject:
        """Return the subject of a name."""
        model = load_model(name).model
        task = task_of(model)
        traits = head_for(task).traits
        rows = 1 if "vocabulary" in traits else EFFECTIVE_BATCH
        if "text" not in traits:
            return cls(name, str(task), rows, (None,))
        pictures = max((default_length(model) or 0) - ROW_TOKENS, 0)  # tokens of them, in each row
        longest = min(most_tokens(model) or 2048, LONGEST + pictures)
        if getattr(model.config, "sliding_window", None) == longest:  # from there on attention has a mask
            longest -= 8
        shortest = (128 if longest > 2048 else 64) + 8 * -(-pictures // 8)
        between = 8 * round(sqrt(shortest * longest) / 8)
        return cls(name, str(task), rows, tuple(dict.fromkeys((shortest, between, longest))))

    @property
    def shape(self) -> str:
        """What decides its points: the class, sizes and lengths, without ids of tokens and the base of positions."""
        model = load_model(self.name).model
        return json.dumps([type(model).__name__, _sizes(model.config.to_dict()), self.lengths], default=str)

    @property
    def shown_lengths(self) -> tuple[int | None, ...]:
        """The lengths that the data has."""
        found: list[int | None] = [self.lengths[0]]
        for low, high in pairwise(self.lengths):
            assert low is not None
            assert high is not None
            steps = max(round(STEPS_OF_AN_OCTAVE * log2(high / low)), 1)
            found += [round(low * (high / low) ** (step / steps)) for step in range(1, steps + 1)]
        return tuple(found)


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _sizes(value) if isinstance(value, dict) else value
        for name, value in sorted(config.items(), key=str)
        if name not in NOT_SIZES and not str(name).endswith("_token_id")
    }


def settings_of(subject: Subject, method: str, gpu: Gpu) -> dict[str, Any]:
    """Return the arguments of ``estimate`` but for the length."""
    precision, dtype, _ = precision_for(subject.name, gpu, None)
    found: dict[str, Any] = {
        "model": subject.name,
        "batch_size": subject.rows,
        "gpu": gpu.name,
        "precision": precision,
        "gradient_accumulation_steps": EFFECTIVE_BATCH // subject.rows,
        "checkpointing": bool(load_model(subject.name).model.supports_gradient_checkpointing),
        "fused_cross_entropy": "vocabulary" in head_for(subject.task).traits,
        "expandable_segments": True,  # without them reserved bytes jump between neighbouring lengths
        **METHODS[method],
    }
    if method in ("lora", "streamed"):
        found["weights_dtype"] = dtype
    if method == "streamed":
        found["embeddings_on_host"] = not has_tied_embeddings(subject.name)
    if method == "qlora" and has_experts(subject.name):
        found["quantize_experts"] = True
    return found


def has_experts(name: str) -> bool:
    """Return whether a well-known model has fused experts, which bitsandbytes' linears are not."""
    return any(hasattr(module, "has_gate") for module in load_model(name).model.modules())  # of its experts interface


def has_tied_embeddings(name: str) -> bool:
    """Return whether the embedding of a well-known model is its head too, so that it stays on the GPU."""
    return bool(tied_embeddings(load_model(name).model))


# ---- The points of one model


def points_of(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield a row for each method and kernels, or one with the reason why it cannot be simulated."""
    model = load_model(subject.name).model
    is_simulated = model.config.model_type not in TOKEN_BY_TOKEN
    is_small = sum(parameter.numel() for parameter in model.parameters()) < STREAMED_FROM
    with keeping_models():
        for method, kernels in product(METHODS, KERNELS):
            asked = {"model": subject.name, "method": method, "kernels": kernels.name}
            if not is_simulated:
                command = f"hf-memopt estimate {subject.name} --seq-len 128 --batch-size 1 --gpu T4"
                yield asked | {"reason": f"not simulated: its layers compute token by token. Call: {command}"}
                continue
            if is_small and method == "streamed":
                yield asked | {"reason": "not simulated: below 1 B parameters, LoRA fits without layers in RAM"}
                continue
            try:
                yield asked | _points(subject, method, kernels)
            except (NotEstimableError, ValueError) as error:
                yield asked | {"reason": str(error).splitlines()[0]}


def _points(subject: Subject, method: str, kernels: Kernels) -> dict[str, Any]:
    asked = settings_of(subject, method, find_gpu(kernels.simulated_on))
    passes = asked["gradient_accumulation_steps"]
    recorded = asked["gradient_accumulation_steps"] = min(passes, 2)  # the passes after the second are like it
    found = {length: estimate(**asked, seq_len=length) for length in subject.lengths}
    first, simulated = found[subject.lengths[0]], list(subject.lengths)
    chunk = chunk_of(subject, first) if asked["fused_cross_entropy"] else None
    return {
        "parameters": first.parameters,
        "trainable": first.trainable_parameters,
        "host_bytes": first.host_bytes,
        "precision": first.settings.precision,
        "rows": subject.rows,
        "task": subject.task,
        "simulated": simulated,
        "lengths": list(subject.shown_lengths),
        "chunk": chunk,
        "pieces": pieces_of({node: whole_timeline(one, passes // recorded) for node, one in found.items()}, chunk),
        "reserved_share": [one.peak_reserved_bytes / one.peak_allocated_bytes for one in found.values()],
        "seconds": seconds_of(subject, found, kernels),
    }


def whole_timeline(found: Estimate, times: int) -> Timeline:
    """Return the timeline with the inputs of so many times the micro-batches, which the Trainer gets at once."""
    components = found.timeline.components.copy()
    components[:, INPUTS] *= times
    return replace(found.timeline, components=components)


def chunk_of(subject: Subject, found: Estimate) -> list[int]:
    """Return the bytes that a row adds to the fused loss's chunks: of logits, and of the hidden states."""
    head = load_model(subject.name).model.get_output_embeddings()
    return [4 * head.weight.shape[0], (4 if found.settings.precision == "fp32" else 2) * head.weight.shape[1]]


# ---- Seconds


def seconds_of(subject: Subject, found: Mapping[int | None, Estimate], kernels: Kernels) -> dict[str, list[float]]:
    """Return the seconds of a step of ``EFFECTIVE_BATCH`` rows at the shown lengths, by GPU; empty where unknown."""
    if any(one.step_time is None or one.step_costs is None for one in found.values()):
        return {}
    costs = {length: whole_step(one.step_costs) for length, one in found.items() if one.step_costs is not None}
    first, *_ = costs.values()
    aligned = [
        (same[0][0], _aligned([of_pass for _, of_pass in same]))
        for same in zip(*(one.passes for one in costs.values()), strict=True)
    ]
    nodes = list(costs)
    shown = {}
    for length in subject.shown_lengths:
        passes = tuple((times, _mixed(alike, weights_at(length, nodes))) for times, alike in aligned)
        shown[length] = costs.get(length) or replace(first, passes=passes, tokens=None)
    rows = {}
    for name in kernels.gpus:
        rows[name] = [float(f"{one.on(name).seconds:.4g}") for one in shown.values()]
    return rows


def whole_step(costs: StepCosts) -> StepCosts:
    """Return the costs of a step of ``EFFECTIVE_BATCH`` rows, of one whose second micro-batch stands for the others."""
    micro_batches = EFFECTIVE_BATCH * costs.micro_batches / costs.examples
    *others, (times, operations) = costs.passes
    passes = (*others, (times + micro_batches - costs.micro_batches, operations))
    found = replace(costs, passes=passes, micro_batches=micro_batches, examples=EFFECTIVE_BATCH)
    if costs.streaming is None:
        return found
    factor = micro_batches / costs.micro_batches  # adapters stay on the GPU: nothing but weights is copied
    copied = {name: round(factor * getattr(costs.streaming, name)) for name in ("in_bytes", "out_bytes", "first_bytes")}
    return replace(found, streaming=replace(costs.streaming, **copied))


def _aligned(passes: Sequence[Counter[Operation]]) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """Return each kind of operation, its costs at several lengths, (operations, lengths, 3), and how often they occur.

    Of each kind, the cheapest belong together and so on up to the dearest. Where one length has more of a kind, as
    chunks of the fused loss, the others have the same sum in as many operations.
    """
    kinds: dict[Any, list[list[tuple[float, float, float]]]] = {}
    for place, of_pass in enumerate(passes):
        for cost, count in of_pass.items():
            alike = kinds.setdefault(cost._replace(flops=0.0, moved_bytes=0.0, launches=0.0), [[] for _ in passes])
            alike[place] += count * [(cost.flops, cost.moved_bytes, cost.launches)]
    found = []
    for kind, alike in kinds.items():
        most = max(map(len, alike))
        costs = np.zeros((most, len(passes), 3))
        for place, one in enumerate(alike):
            if one:
                costs[:, place] = np.array(sorted(one))[np.arange(most) * len(one) // most] * (len(one) / most)
        different, counts = np.unique(costs.reshape(most, -1), axis=0, return_counts=True)
        found.append((kind, different.reshape(len(counts), len(passes), 3), counts))
    return found


def _mixed(aligned: Sequence[tuple[Any, np.ndarray, np.ndarray]], weights: Sequence[float]) -> Counter[Operation]:
    """Return the operations between those of several lengths, by the weights of these."""
    mixed: Counter[Operation] = Counter()
    for kind, costs, counts in aligned:
        at = np.einsum("olc,l->oc", costs, weights).clip(0.0).tolist()
        for (flops, moved, launches), count in zip(at, counts.tolist(), strict=True):
            mixed[kind._replace(flops=flops, moved_bytes=moved, launches=launches)] += count
    return mixed


# ---- Between the points


def parts_at(row: Row, gpu: Gpu, length: int | None) -> dict[str, int]:
    """Return what a row of ``points_of`` says a length needs on a GPU, by the names of pictures, as the page does."""
    components = dict(zip(COMPONENTS, map(round, components_at(row, length)), strict=True))
    if has_large_workspace(gpu):
        components["workspace"] += LARGER_WORKSPACES_BYTES
    allocated = sum(components.values())
    share = between(row["simulated"], row["reserved_share"], length)
    return {CONTEXT: gpu.context_bytes or 0, **components, UNUSED: round((share - 1) * allocated)}


def curve(lengths: Sequence[int | None], values: Sequence[float], length: int | None) -> float:
    """Return the value on the parabola through the three lengths around it; that of the nearest end outside."""
    known = [one for one in lengths if one is not None]
    if length is None or not known[0] < length < known[-1]:
        return between(lengths, values, length)
    first = first_near(length, known)
    nodes = known[first : first + 3]
    return sum(map(mul, weights_at(length, nodes), values[first : first + 3]))


def between(lengths: Sequence[int | None], values: Sequence[float], length: int | None) -> float:
    """Return the value on the line between the two lengths around it; that of the nearest end outside.

    Examples:
        >>> between([128, 1024], [10.0, 38.0], 512), between([None], [10.0], None)
        (22.0, 10.0)
    """
    if length is None or length <= (lengths[0] or 0):
        return values[0]
    for place, (low, high) in enumerate(pairwise(lengths)):
        if low is not None and high is not None and length <= high:
            return values[place] + (values[place + 1] - values[place]) * (length - low) / (high - low)
    return values[-1]


# ---- Random points


@dataclass(frozen=True)
class Point:
    """A question to the page."""

    row: Row
    gpu: Gpu
    length: int | None


def random_point(rows: Sequence[Row], chance: Random) -> Point:
    """Return a model, method and GPU of the rows, and a length in whole eights that the page has."""
    row = chance.choice([row for row in rows if "reason" not in row])
    [gpus] = [kernels.gpus for kernels in KERNELS if kernels.name == row["kernels"]]
    low, high = row["lengths"][0], row["lengths"][-1]
    length = None if low is None else 8 * chance.randint(-(-low // 8), high // 8)
    return Point(row, find_gpu(chance.choice(gpus)), length)


def errors_of(point: Point) -> dict[str, float]:
    """Return by how much, as a share, allocated bytes, total and seconds of the page differ from a simulation."""
    row, gpu = point.row, point.gpu
    subject = Subject(row["model"], row["task"], row["rows"], ())
    found = estimate(**settings_of(subject, row["method"], gpu), seq_len=point.length)
    parts = parts_at(row, gpu, point.length)
    allocated = sum(size for name, size in parts.items() if name in COMPONENTS)
    errors = {
        "allocated": allocated / found.peak_allocated_bytes - 1,
        "total": sum(parts.values()) / found.total_bytes - 1,
    }
    if found.step_time is not None and row["seconds"]:
        seconds = curve(row["lengths"], row["seconds"][gpu.name], point.length)
        errors["seconds"] = seconds / found.step_time.seconds - 1
    return errors


def names() -> list[str]:
    """Return the names of all models, in the order of the table."""
    return list(known_models())
