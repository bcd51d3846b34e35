"""Simulate what every well-known model needs: the points of ``docs/does-it-fit.html`` (``fit_data.py`` writes it).

Each model is asked for three methods: full, LoRA, QLoRA, with checkpointing and, for language models, the fused loss.
One recording serves all GPUs of a kind of kernels. Four lengths are recorded, and between them bytes and operations are
polynomials of the length: of each moment of a step, and of each operation, not of their peaks and seconds. Only the
logits of the fused loss are not, as it cuts the rows into chunks: they are a line over the rows of a chunk.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import log2
from operator import mul
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

from hf_memopt import GPUS, Estimate, Gpu, NotEstimableError, estimate, find_gpu
from hf_memopt.binding.fused_loss.chunked_loss import CHUNK_BYTES
from hf_memopt.binding.model import head_for, task_of
from hf_memopt.components import COMPONENTS, CONTEXT, UNUSED
from hf_memopt.devices import against_float16
from hf_memopt.memory import precision_for
from hf_memopt.memory.cuda import workspace_bytes
from hf_memopt.memory.models import DEFAULT_LENGTH, default_length, known_models, load_model, most_tokens
from hf_memopt.memory.recording import keeping_models
from hf_memopt.memory.step_time import Operation, StepCosts
from hf_memopt.memory.tracking import Timeline, phase_spans

METHODS = {"full": {}, "lora": {"lora": 16}, "qlora": {"lora": 16, "load_in": "nf4"}}
EFFECTIVE_BATCH = 8
LONGEST = 4096
STEPS_OF_AN_OCTAVE = 1.5
ASKED_OF_A_PIECE = 96  # lengths of which the fullest moment is kept
NEGLIGIBLE = 2e-4  # of a peak
INPUTS, LOGITS = COMPONENTS.index("inputs"), COMPONENTS.index("logits and loss")
TOKEN_BY_TOKEN = {"mamba"}  # in transformers' own code: thousands of operations a token, hours of recording a model
NOT_SIZES = {"rope_parameters", "rope_theta", "max_position_embeddings", "initializer_range", "transformers_version"}
LARGER_WORKSPACES_BYTES = sum(workspace_bytes((9, 0))) - sum(workspace_bytes((8, 6)))


Row = Mapping[str, Any]


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
    """Return the kernels that a GPU runs; None for AMD's, and for those without tensor cores."""
    if gpu.context_bytes is None or against_float16(gpu.name) or gpu.compute_capability < (7, 0):
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
        pictures = max((default_length(model) or 0) - DEFAULT_LENGTH, 0)  # tokens of them, in each row
        longest = min(most_tokens(model) or 2048, LONGEST + pictures)
        shortest = (128 if longest > 2048 else 64) + 8 * -(-pictures // 8)
        octaves = log2(longest / shortest) / 3
        between = [8 * round(shortest * 2 ** (step * octaves) / 8) for step in (1, 2)]
        return cls(name, str(task), rows, tuple(dict.fromkeys((shortest, *between, longest))))

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
    if method == "lora":
        found["weights_dtype"] = dtype
    if method == "qlora" and has_experts(subject.name):
        found["quantize_experts"] = True
    return found


def has_experts(name: str) -> bool:
    """Return whether a well-known model has fused experts, which bitsandbytes' linears are not."""
    return any(hasattr(module, "has_gate") for module in load_model(name).model.modules())  # of its experts interface


# ---- The points of one model


def points_of(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield a row for each method and kernels, or one with the reason why it cannot be simulated."""
    is_simulated = load_model(subject.name).model.config.model_type not in TOKEN_BY_TOKEN
    with keeping_models():
        for method, kernels in product(METHODS, KERNELS):
            asked = {"model": subject.name, "method": method, "kernels": kernels.name}
            if not is_simulated:
                command = f"hf-memopt estimate {subject.name} --seq-len 128 --batch-size 1 --gpu T4"
                yield asked | {"reason": f"not simulated: its layers compute token by token. Call: {command}"}
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


def pieces_of(timelines: Mapping[int | None, Timeline], chunk: Sequence[int] | None) -> list[dict[str, Any]]:
    """Return the moments that are fullest at some length, for each three lengths that follow one another.

    Returns:
        For each three: "lengths", and "moments": their components in bytes, (moments, lengths, components).
    """
    pieces = []
    simulated = list(timelines)
    for nodes in (simulated[first : first + 3] for first in range(max(len(simulated) - 2, 1))):
        runs = [timelines[node] for node in nodes]
        moments = common_moments(runs)
        moments = moments[_is_one_moment(moments, nodes, chunk)]
        peaks = np.stack([run.components[run.allocated.argmax()] for run in runs])
        if (moments.sum(axis=2).max(axis=0, initial=0) < peaks.sum(axis=1) * (1 - NEGLIGIBLE)).any():
            moments = np.concatenate([moments, peaks[None]])
        asked = [*nodes]
        if nodes[0] is not None:
            asked += np.geomspace(nodes[0], nodes[-1], ASKED_OF_A_PIECE, dtype=int).tolist()
        pieces.append({"lengths": nodes, "moments": _fullest(moments, nodes, asked, chunk)})
    return pieces


def common_moments(timelines: Sequence[Timeline]) -> np.ndarray:
    """Return the components after every event that some runs have in common, (moments, runs, components).

    Such a moment is a polynomial of the length; the peak is not, as it is another moment at another length. Runs have
    the same events but for a few, such as those of the fused loss's chunks.
    """
    phases = zip(*(list(phase_spans(one)) for one in timelines), strict=True)
    return np.concatenate([_common_of_phase(timelines, spans) for spans in phases])


def _common_of_phase(timelines: Sequence[Timeline], spans: Sequence[tuple[int, int, str]]) -> np.ndarray:
    from rapidfuzz.distance import LCSseq

    runs = [one.components[first:end] for one, (first, end, _) in zip(timelines, spans, strict=True)]
    first, *others = ([bytes(change) for change in _changes(run)] for run in runs)
    places = np.full((len(runs), len(first)), -1)
    places[0] = np.arange(len(first))
    for partner, other in zip(places[1:], others, strict=True):
        for block in LCSseq.opcodes(first, other).as_matching_blocks():
            partner[block.a : block.a + block.size] = np.arange(block.b, block.b + block.size)
    places = places[:, (places >= 0).all(axis=0)]
    return np.stack([run[place] for run, place in zip(runs, places, strict=True)], axis=1)


def _changes(run: np.ndarray) -> np.ndarray:
    """Return what each event does to each component, 1: more, -1: less, (events, components)."""
    return np.sign(np.diff(run, axis=0, prepend=run[:1])).astype(np.int8)


def _fullest(
    moments: np.ndarray, nodes: Sequence[int | None], asked: Iterable[int | None], chunk: Sequence[int] | None
) -> list[list[list[int]]]:
    """Return those moments of which one is fullest at each length asked for."""
    logits = moments[..., LOGITS].astype(float)
    others = moments.sum(axis=2) - logits
    chosen: list[int] = []
    for length in asked:
        totals = others @ weights_at(length, nodes) + logits @ logits_weights_at(length, nodes, chunk)
        fullest = int(totals.argmax())
        if not chosen or totals[chosen].max() < totals[fullest] * (1 - NEGLIGIBLE):
            chosen.append(fullest)
    found: list[list[list[int]]] = moments[chosen].tolist()
    return found


def _is_one_moment(moments: np.ndarray, nodes: Sequence[int | None], chunk: Sequence[int] | None) -> np.ndarray:
    """Return for which moments the components grow as those of one do, (moments,).

    The others are different moments whose events are alike, say of a chunk of the loss and of what follows.
    """
    slack = 0.005 * moments.sum(axis=2).max()
    logits = moments[..., LOGITS].astype(float)
    on_line = logits @ np.transpose([logits_weights_at(node, nodes, chunk) for node in nodes])
    found: np.ndarray = (abs(on_line - logits) <= slack).all(axis=1)
    for place, (low, high) in enumerate(pairwise(nodes)):
        shorter, longer = (np.delete(moments[:, one], LOGITS, axis=1) for one in (place, place + 1))
        found &= (longer >= shorter - slack).all(axis=1) & (longer <= shorter * (high / low) ** 2 + slack).all(axis=1)
    return found


def components_at(row: Row, length: int | None) -> list[float]:
    """Return the components of the fullest moment of a row at a length, in bytes."""
    piece = row["pieces"][0]
    if length is not None:
        nodes = [*(piece["lengths"][0] for piece in row["pieces"][:-1]), *row["pieces"][-1]["lengths"]]
        length = min(max(length, nodes[0]), nodes[-1])
        piece = row["pieces"][first_near(length, nodes)]
    moments, nodes = np.array(piece["moments"], dtype=float), piece["lengths"]
    at = np.einsum("mnc,n->mc", moments, weights_at(length, nodes))
    at[:, LOGITS] = moments[..., LOGITS] @ logits_weights_at(length, nodes, row["chunk"])
    found: list[float] = at[at.sum(axis=1).argmax()].tolist()
    return found


def logits_weights_at(length: int | None, nodes: Sequence[int | None], chunk: Sequence[int] | None) -> list[float]:
    """Return the weights of the logits: with the fused loss they are on a line over the rows of a chunk."""
    if chunk is None:
        return weights_at(length, nodes)
    rows = [rows_of_chunk(chunk, node) for node in nodes]
    mean = sum(rows) / len(rows)
    slope = (rows_of_chunk(chunk, length) - mean) / max(sum((one - mean) ** 2 for one in rows), 1.0)
    return [1 / len(rows) + slope * (one - mean) for one in rows]


def rows_of_chunk(chunk: Sequence[int] | None, length: int | None) -> float:
    """Return how many rows a chunk of the fused loss has, which logits grow with; 1 without it.

    Args:
        chunk: see `chunk_of`.
        length: of the one row of a micro-batch.

    Examples:
        >>> rows_of_chunk([4 * 50257, 2 * 1024], 232), rows_of_chunk([4 * 50257, 2 * 1024], 408)
        (232.0, 204.0)
    """
    if chunk is None or length is None:
        return 1.0
    most = max(1, max(CHUNK_BYTES, chunk[1] * length) // chunk[0])
    return length / -(-length // most)


def first_near(length: int, known: Sequence[int]) -> int:
    """Return the place of the first of three neighbouring lengths: the two around one, and the next that is nearer.

    Examples:
        >>> first_near(2, [1, 3, 5, 9]), first_near(6, [1, 3, 5, 9]), first_near(4, [4])
        (0, 1, 0)
    """
    above = min(max(bisect_left(known, length), 1), len(known) - 1)
    is_below_nearer = above > 1 and length**2 < known[above - 1] * known[above]
    return max(min(above - 2 if is_below_nearer else above - 1, len(known) - 3), 0)


def weights_at(length: int | None, nodes: Sequence[int | None]) -> list[float]:
    """Return the weights of the values at some lengths in the polynomial through them.

    Examples:
        >>> weights_at(2, [1, 3, 5])
        [0.375, 0.75, -0.125]
    """
    weights = []
    for node in nodes:
        weight = 1.0
        for other in nodes:
            if length is not None and node is not None and other is not None and other != node:
                weight *= (length - other) / (node - other)
        weights.append(weight)
    return weights


def is_followed(row: Row) -> bool:
    """Return whether a row has the moments of its simulated lengths, and not one of each length that earlier data has.

    Such rows are simulated anew by ``fit_data``.
    """
    return "reason" in row or row["pieces"][0]["lengths"] == row["simulated"][:3]


# ---- Seconds


def seconds_of(subject: Subject, found: Mapping[int | None, Estimate], kernels: Kernels) -> dict[str, list[float]]:
    """Return the seconds of a step of ``EFFECTIVE_BATCH`` rows at the shown lengths, by GPU; empty where unknown."""
    if any(one.step_time is None or one.step_costs is None for one in found.values()):
        return {}
    costs = {length: whole_step(one.step_costs) for length, one in found.items() if one.step_costs is not None}
    shown = {length: costs_at(length, costs) for length in subject.shown_lengths}
    rows = {}
    for name in kernels.gpus:
        rows[name] = [float(f"{one.on(name).seconds:.4g}") for one in shown.values()]
    return rows


def whole_step(costs: StepCosts) -> StepCosts:
    """Return the costs of a step of ``EFFECTIVE_BATCH`` rows, of one whose second micro-batch stands for the others."""
    micro_batches = EFFECTIVE_BATCH * costs.micro_batches / costs.examples
    *others, (times, operations) = costs.passes
    passes = (*others, (times + micro_batches - costs.micro_batches, operations))
    return replace(costs, passes=passes, micro_batches=micro_batches, examples=EFFECTIVE_BATCH)


def costs_at(length: int | None, known: Mapping[int | None, StepCosts]) -> StepCosts:
    """Return the costs at a length, recorded or between recorded ones."""
    if length in known:
        return known[length]
    assert length is not None
    simulated = [node for node in known if node is not None]
    nodes = simulated[(first := first_near(length, simulated)) : first + 3]
    found, weights = [known[node] for node in nodes], weights_at(length, nodes)
    passes = zip(*(one.passes for one in found), strict=True)
    mixed = tuple((same[0][0], _mixed([of_pass for _, of_pass in same], weights)) for same in passes)
    return replace(found[0], passes=mixed, tokens=None)


def _mixed(passes: Sequence[Counter[Operation]], weights: Sequence[float]) -> Counter[Operation]:
    """Return the operations between those of several lengths.

    Of each kind, the cheapest belong together and so on up to the dearest. Where one length has more of a kind, as
    chunks of the fused loss, the others have the same sum in as many operations.
    """
    kinds: dict[Any, list[list[tuple[float, float, float]]]] = {}
    for place, of_pass in enumerate(passes):
        for cost, count in of_pass.items():
            alike = kinds.setdefault(cost._replace(flops=0.0, moved_bytes=0.0, launches=0.0), [[] for _ in passes])
            alike[place] += count * [(cost.flops, cost.moved_bytes, cost.launches)]
    mixed: Counter[Operation] = Counter()
    for kind, alike in kinds.items():
        most = max(map(len, alike))
        costs = np.zeros((most, 3))
        for weight, one in zip(weights, alike, strict=True):
            if one:
                ordered = np.array(sorted(one))
                costs += weight * ordered[np.arange(most) * len(one) // most] * (len(one) / most)
        for (flops, moved, launches), count in Counter(map(tuple, costs.clip(0.0).tolist())).items():
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
