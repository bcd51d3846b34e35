"""The picture of a rehearsal: its events as a ``Timeline``, drawn as an estimate's is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_memopt import plotting
from hf_memopt.components import COMPONENTS, parts_of
from hf_memopt.prediction.memory.output import timeline_data
from hf_memopt.prediction.memory.tracking import Timeline
from hf_memopt.prediction.rehearsal.events import Event
from hf_memopt.prediction.rehearsal.output import first_lines
from hf_memopt.prediction.reports.pictures import Limit, TimelinePicture
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.prediction.rehearsal.result import Rehearsal

STRETCHES = 2000
OF_NAMES = {"weights": "weights", "gradients": "gradients", "state": "optimizer state", "outputs": "logits and loss"}


def data_of(events: list[Event], names: dict[int, str], steps: list[int], begun: int) -> dict[str, Any]:
    """Return the timeline as plain data; ``steps`` are the moments at which steps end, ``begun`` how many began."""
    changes = np.zeros((len(events), len(COMPONENTS)), np.int64)
    reserved = np.zeros(len(events), np.int64)
    owners: dict[int, int] = {}
    for at, event in enumerate(events):
        if event.kind == "allocate":
            kept = "activations" if event.phase == "forward" else "inputs" if event.phase == "load" else "temporaries"
            owners[event.number] = COMPONENTS.index(OF_NAMES.get(names.get(event.number, "").split(" ")[0], kept))
        if event.number in owners:
            changes[at, owners[event.number]] = event.allocated_bytes
        elif event.kind.startswith("segment"):
            reserved[at] = event.requested_bytes if event.kind == "segment" else -event.requested_bytes
    phases = [(at, e.phase) for at, e in enumerate(events) if not at or e.phase != events[at - 1].phase]
    training = next((at for at, name in phases if name == "forward"), 0)
    ends = [next((at for at, e in enumerate(events) if e.moment >= moment), len(events)) for moment in steps]
    starts = tuple((at, number) for number, at in enumerate([training, *ends], start=1))
    line = Timeline(changes.cumsum(axis=0), reserved.cumsum(), tuple(phases), starts[:begun])
    at = line.deciding_event
    peak: Any = SimpleNamespace(timeline=line, components=line.parts_at(at), phase=events[at].phase, module="")
    return dict(timeline_data(peak, STRETCHES))


def draw(found: Rehearsal, path: Path) -> None:
    """Draw the timeline to a PNG, SVG or PDF file."""
    line: Any = found.timeline
    position = line["positions"].index(line["peak"]["position"])
    parts = {name: sizes[position] for name, sizes in line["components"].items()}
    bars = parts_of(parts, max(line["reserved_bytes"]), found.context_bytes)
    usable = f"usable on {found.gpu}: {format_bytes(found.usable_bytes)}"
    picture = TimelinePicture(line, bars, Limit(found.gpu, found.usable_bytes), usable, title=first_lines(found)[0])
    plotting.write_picture(path, picture.draw, purpose="the picture of a rehearsal")
