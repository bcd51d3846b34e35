"""What a step needs between simulated lengths: ``fit_points`` calls this.

The runs of neighbouring lengths are aligned event by event. The components after an event are polynomials of the
length, and the fullest moment is chosen at each length anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hf_memopt.components import COMPONENTS
from hf_memopt.prediction.memory.tracking import Timeline, phase_spans
from hf_memopt.training.binding.fused_loss.chunked_loss import CHUNK_BYTES

ASKED_OF_A_PIECE = 96  # lengths of which the fullest moment is kept
NEGLIGIBLE = 2e-4  # of a peak
LEAST_SLACK_BYTES = 2**24  # a quarter of a chunk of logits
LOGITS = COMPONENTS.index("logits and loss")

Row = Mapping[str, Any]


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
        # the peaks themselves, where events that they are at are not common to all
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
    slack = max(0.005 * moments.sum(axis=2).max(), LEAST_SLACK_BYTES)
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
