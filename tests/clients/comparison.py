"""Train a client in a set-up, and compare what came of it with what comes of stock."""

from __future__ import annotations

import functools
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, set_seed

import hf_memopt
from client import BATCH, CUT, PASSED, SETUPS, VIEW, Client, train_and_evaluate
from hf_memopt import attach, bucketed

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""What a cut may change: its sums run in another order and over shorter rows, one rounding of float32 (6e-8) each, and
four steps pass them on from weight to gradient to weight. Everything else is compared bit for bit.
"""
NARROW = (2e-2, 1e-3)
"""The same in bfloat16, whose one rounding is 4e-3."""

_TIMES = re.compile("time|per_second")
_OF_A_CUT_STEP = re.compile("loss|grad_norm|learning_rate|eval_.*|weights.*")
"""What is compared where a batch was cut. Other metrics of training steps, such as TRL's entropy, are means over
forward passes, of which a cut step has more.
"""


class Outcome(NamedTuple):
    """What came of a client's training in a set-up.

    ``verdict``: "same", "equal" (within the tolerance), "refused", "differs" or "error"; ``detail``: the message, or
    what differs most; ``warnings``: those that stock does not give.
    """

    verdict: str
    detail: str = ""
    warnings: tuple[str, ...] = ()


class Run(NamedTuple):
    """What is compared of a training, by name, and its warnings."""

    values: dict[str, Any]
    warnings: tuple[str, ...]


def outcome_of(client: Client, setup: str) -> Outcome:
    """Train a client in a set-up and compare it with stock, corrected by hand where the client says how."""
    is_view = setup in VIEW and not client.no_view
    stock = _stock_run(client, is_view, client.correct is not None)
    try:
        ours = _run(
            client,
            functools.partial(_view, client) if is_view else _unchanged,
            None if setup == PASSED else lambda trainer: attach(trainer, *(make() for make in SETUPS[setup])),
            SETUPS[setup] if setup == PASSED else (),
        )
    except Exception as error:  # whatever the client, or what stands over it, raises
        return outcome_of_error(error)
    new = tuple(dict.fromkeys(text for text in ours.warnings if text not in stock.warnings))
    if (
        client.correct is not None
        and compared(ours.values, _stock_run(client, is_view, False).values).verdict == "same"
    ):
        return Outcome("error", "the same as stock without the correction")
    return compared(ours.values, stock.values, is_cut=setup == CUT)._replace(warnings=new)


def outcome_of_error(error: Exception) -> Outcome:
    """Return whether an error is a refusal of this package, and its message."""
    is_refusal = isinstance(error, (ValueError, TypeError, RuntimeError)) and _is_raised_by_us(error)
    text = str(error) if is_refusal else f"{type(error).__name__}: {error}"
    return Outcome("refused" if is_refusal else "error", without_figures(text))


def without_figures(text: str) -> str:
    """Replace what depends on the machine: figures that are not whole, and temporary folders."""
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+", "FOLDER", text)
    return re.sub(r"-?\b\d+\.\d+(e-?\d+)?\b|\b\d+e-\d+\b|\bnan\b|-0\b", "#", text)


# ---- Running --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _stock_run(client: Client, is_ordered: bool, is_corrected: bool) -> Run:
    """Train with stock; ``is_ordered``: on the examples in the order in which a view would give them."""
    arrange = functools.partial(_in_view_order, client) if is_ordered else _unchanged
    return _run(client, arrange, client.correct if is_corrected else None)


def _run(
    client: Client,
    arrange: Callable[[Any], Any],
    prepare: Callable[[Any], object] | None,
    passed: Sequence[Callable[[], TrainerCallback]] = (),
) -> Run:
    def build(folder: Path) -> Any:
        with _passing(passed) if passed else nullcontext():
            trainer = client.build(folder, arrange)
        if arrange is not _unchanged:
            trainer.args.train_sampling_strategy = "sequential"
        if prepare is not None:
            prepare(trainer)
        return trainer

    return run(build, client.drive or train_and_evaluate)


@contextmanager
def _passing(callbacks: Sequence[Callable[[], TrainerCallback]]) -> Iterator[None]:
    """Let each Trainer that is built get these in ``callbacks=``, too, whoever builds it."""
    init, made = Trainer.__init__, callbacks

    @functools.wraps(init)
    def with_callbacks(self: Any, *args: Any, callbacks: Any = None, **kwargs: Any) -> None:
        init(self, *args, callbacks=[*(callbacks or ()), *(make() for make in made)], **kwargs)

    with patch.object(Trainer, "__init__", with_callbacks):
        yield


def run(build: Callable[[Path], Any], drive: Callable[[Any], Mapping[str, Any]]) -> Run:
    """Build a trainer in a folder for its output, and train it."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_seed(0)
        trainer = build(Path(folder))
        metrics = drive(trainer)
        values = dict(_values(trainer, metrics))
    return Run(values, tuple(without_figures(str(warning.message)) for warning in caught))


def _unchanged(dataset: Any) -> Any:
    return dataset


def _view(client: Client, dataset: Any) -> Any:
    lengths = None if client.lengths is None else client.lengths(dataset)
    return bucketed(dataset, batch_size=BATCH, lengths=lengths, seed=0)


def _in_view_order(client: Client, dataset: Any) -> Any:
    """Return the examples in the order of the view's first epoch, by hand."""
    view = _view(client, dataset)
    indices = [view.indices_of([position])[0] for position in range(len(view))]
    if isinstance(dataset, Dataset):
        return dataset.select(indices)
    return [dataset[index] for index in indices]


def _is_raised_by_us(error: Exception) -> bool:
    """Return whether the last frame of the error's traceback is in this package."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    folder = Path(hf_memopt.__file__).parent
    return traceback is not None and folder in Path(traceback.tb_frame.f_code.co_filename).parents


# ---- Comparing ------------------------------------------------------------------------------------------------------


def _values(trainer: Any, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give everything that is compared, by name: what each step logged, metrics, weights."""
    if not isinstance(trainer, Trainer):  # a wrapper around one
        return
    for number, entry in enumerate(trainer.state.log_history):
        yield from ((f"{name} [{number}]", value) for name, value in entry.items() if not _TIMES.search(name))
    yield from ((f"{name} [end]", value) for name, value in metrics.items() if not _TIMES.search(name))
    if trainer.model is None:  # a search keeps none
        return
    for name, value in trainer.accelerator.unwrap_model(trainer.model).state_dict().items():
        if torch.is_tensor(value):
            yield f"weights of {name}", value.clone()


def compared(
    ours: Mapping[str, Any],
    stock: Mapping[str, Any],
    *,
    is_cut: bool = False,
    compares_all: bool = False,
    tolerance: tuple[float, float] = (RELATIVE, ABSOLUTE),
) -> Outcome:
    """Compare by name; what ours has more, such as a memory report's readings, is left out.

    ``is_cut``: within the tolerance; ``compares_all``: also what a cut step may log otherwise.
    """
    names = [name for name in stock if compares_all or not is_cut or _OF_A_CUT_STEP.match(name)]
    missing = [name for name in names if name not in ours]
    if missing:
        return Outcome("differs", f"without {', '.join(missing[:3])}")
    different = [name for name in names if not _is_equal(ours[name], stock[name])]
    if not different:
        return Outcome("same")
    if is_cut and all(_is_close(ours[name], stock[name], *tolerance) for name in different):
        return Outcome("equal")
    shown = next((name for name in different if not _is_close(ours[name], stock[name], *tolerance)), different[0])
    return Outcome("differs", f"{len(different)} of {len(names)}, {shown}: {_told(ours[shown], stock[shown])}")


def _is_equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.shape == other.shape and torch.equal(one, other)
    return bool(one == other) or (one != one and other != other)  # NaN


def _is_close(one: Any, other: Any, relative: float, absolute: float) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.shape == other.shape and torch.allclose(one, other, rtol=relative, atol=absolute)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=relative, abs_tol=absolute)
    return False


def _told(one: Any, other: Any) -> str:
    if torch.is_tensor(one):
        return f"by {(one.double() - other.double()).abs().max():.2e}"
    if isinstance(one, float) and isinstance(other, float):
        return f"{one:.6g} instead of {other:.6g}"
    return f"{one} instead of {other}"
