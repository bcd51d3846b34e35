"""Evaluate and predict with little padding: a view sorted by length, and results in the order of the dataset.

``sorted_by_length`` shows the longest example first, so that a GPU that is too small fails in the first batch, and
``per_device_eval_batch_size`` neighbours need hardly any padding. After ``attach(trainer)``, ``trainer.evaluate`` and
``trainer.predict`` return predictions and labels in dataset order, ``compute_metrics`` gets them so, and the metrics
have one more loss, which does not depend on how rows are batched:

- ``eval_loss_per_example`` (one label, or one vector of numbers, per row): in one process equal to ``eval_loss``.
- ``eval_loss_per_token`` (one label per token): the summed loss of all counted labels, divided by their number. Labels
  of -100 do not count, nor does the first of a causal LM's row. ``eval_loss`` is a mean of batch means there, in any
  order.

With several processes the rows that fill up the last step count once; they cost one more forward pass of that step.
While a view is evaluated, the loss of a batch is the mean over its own labels, in its own process: ``eval_loss`` is not
multiplied by the number of processes, as stock does for heads that ignore ``num_items_in_batch``.

Limitations: for losses that are not a mean over labels (a router's auxiliary loss, contrastive losses) the additional
metric is a weighted mean of batch losses. Labels under another name than ``labels`` get no additional metric. Tensor
and context parallelism, where processes share rows, were not tested. Reading the view without ``attach`` raises, since
predictions would come back in its own order, unless it was made with ``restore_by_hand=True``, for a loop of your own
that calls ``restore_order`` with its predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.utils.data import SequentialSampler

from hf_memopt.plain_data import check_value
from hf_memopt.training.batching import lengths_of
from hf_memopt.training.batching.collation import RowReader
from hf_memopt.training.batching.plan import checked_position
from hf_memopt.training.batching.views.view import (
    DescribedByDataset,
    is_padding_free,
    reads_in_order,
    takes_columns,
)
from hf_memopt.training.binding.losses import is_stock
from hf_memopt.training.binding.model import IGNORED_LABEL, is_causal_lm, used_columns
from hf_memopt.training.binding.undo import override_method, set_attribute

if TYPE_CHECKING:
    from transformers import Trainer

# Training arguments under which predictions cannot be put back into dataset order: the value, and why.
_LOSES_ORDER: dict[str, tuple[Any, str]] = {
    "dataloader_drop_last": (
        True,
        "would leave the shortest examples out of the evaluation; expected False. "
        "Pass TrainingArguments(..., dataloader_drop_last=False)",
    ),
    "eval_do_concat_batches": (
        False,
        "keeps predictions in batches, which have no place in dataset order; expected True. "
        "Pass TrainingArguments(..., eval_do_concat_batches=True)",
    ),
    "train_sampling_strategy": (
        "group_by_length",
        "permutes evaluation too, so predictions could not be put back into dataset order; expected another strategy. "
        'Train with bucketed(...) and TrainingArguments(..., train_sampling_strategy="sequential")',
    ),
}


def loses_order(args: Any) -> str | None:
    """Return the training argument under which predictions cannot be put back into dataset order; None if none."""
    return next((name for name, (value, _) in _LOSES_ORDER.items() if getattr(args, name) == value), None)


def sorted_by_length(
    dataset: Any, *, lengths: ArrayLike | None = None, column: str = "input_ids", restore_by_hand: bool = False
) -> SortedExamples:
    """Return a view of a map-style dataset for evaluation and prediction, the longest example first.

    Examples of one length keep their order.

    Args:
        dataset: a ``datasets.Dataset`` or anything with ``__len__`` and ``__getitem__``; it is not copied.
        lengths: tokens per example, shape (examples,); read by ``token_lengths(dataset, column)`` unless given.
        column: the column whose length counts.
        restore_by_hand: for a loop of your own, not for an attached Trainer: the view may be read by anything, and
            ``restore_order`` brings predictions back into dataset order.

    Raises:
        ValueError: an empty dataset, one without the column, or lengths that are not one per example.
        TypeError: the dataset is not map-style.

    Examples:
        >>> rows = [{"input_ids": [5]}, {"input_ids": [6, 7, 8]}, {"input_ids": [9, 9]}]
        >>> view = sorted_by_length(rows, restore_by_hand=True)
        >>> [row["input_ids"] for row in view]
        [[6, 7, 8], [9, 9], [5]]
        >>> view.restore_order(np.array([3, 2, 1]))
        array([1, 3, 2])
    """
    check_value("restore_by_hand", restore_by_hand, bool, True)
    found = lengths_of(dataset, lengths, column)
    order = np.argsort(-found.astype(np.int64), kind="stable")
    return SortedExamples(dataset, order, restore_by_hand=restore_by_hand)


class SortedExamples(DescribedByDataset, torch.utils.data.Dataset[Any]):
    """The examples of a dataset in another order, and the way back.

    Attributes:
        dataset: the dataset itself.
        order: the dataset's index of the example at each position, shape (examples,).
    """

    made_by = "sorted_by_length"

    def __init__(self, dataset: Any, order: NDArray[np.int64], *, restore_by_hand: bool = False) -> None:
        self.dataset = dataset
        self.order = order
        self.restore_by_hand = restore_by_hand
        self._reader = RowReader(dataset)
        self._as_columns = False  # hand a batch as columns to the collator, past stock's that takes rows apart
        # The id of the DataLoader whose results are put back, 0 while there is none; DataLoader workers get a copy.
        self._restored_for = 0

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Any:
        self._check_read()
        return self._reader.read([int(self.order[checked_position(position, len(self))])])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the examples at these positions; in an evaluation with our collator as one item, their columns."""
        self._check_read()
        examples = self.order[np.asarray(positions)]
        return [self._reader.read_columns(examples)] if self._as_columns else self._reader.read(examples)

    def _check_read(self) -> None:
        if not (self.restore_by_hand or self._restored_for):
            raise RuntimeError(
                "dataset=<SortedExamples> is read outside the evaluation of an attached Trainer, so predictions would "
                "come back in its own order, the longest example first; expected attach(trainer) before "
                "trainer.evaluate() or trainer.predict(). In a loop of your own pass sorted_by_length(..., "
                "restore_by_hand=True) and call view.restore_order(predictions); a callback reads the dataset itself: "
                "DataLoader(eval_dataloader.dataset.dataset, batch_size=8, collate_fn=eval_dataloader.collate_fn)"
            )
        self.check_size(len(self), "sorted_by_length(dataset)")

    def restore_order(self, values: Any) -> Any:
        """Return values, which are in the order of this view, in the order of the dataset.

        Args:
            values: arrays or tensors of shape (examples, ...), None, or tuples, lists and dicts of them, as
                ``predictions`` and ``label_ids`` are. They are not changed; the result is a copy.

        Raises:
            ValueError: an array does not have one row per example.
            TypeError: anything else, a list of strings for example.
        """
        if values is None:
            return None
        if isinstance(values, Mapping):
            return {name: self.restore_order(value) for name, value in values.items()}
        if isinstance(values, (tuple, list)):
            return type(values)(map(self.restore_order, values))
        if not isinstance(values, (np.ndarray, torch.Tensor)):
            raise TypeError(
                f"values=<{type(values).__name__}> cannot be put into another order; expected arrays, tensors, or "
                "tuples, lists and dicts of them. Call: view.restore_order(np.array(values))"
            )
        if values.shape[:1] != (len(self),):
            raise ValueError(
                f"values=<array of shape {tuple(values.shape)}> has not one row for each of {len(self)} examples; "
                "expected shape (examples, ...). An output of the model that is none per example is left out by: "
                'trainer.evaluate(ignore_keys=["aux_loss"])'
            )
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(self))
        return values[place] if isinstance(values, np.ndarray) else values[torch.from_numpy(place).to(values.device)]

    # ---- What attach calls ------------------------------------------------------------------------------------------

    def bind_trainer(self, trainer: Trainer) -> NoReturn:
        """Raise ValueError: this order is for evaluation only."""
        raise ValueError(
            "train_dataset=<SortedExamples> would show the longest examples first in every epoch; expected an order "
            "for training. Pass Trainer(..., train_dataset=bucketed(view.dataset, batch_size=32))"
        )

    def check_evaluation(self, trainer: Any) -> None:
        """Raise ValueError where predictions could not be put back into dataset order."""
        if self.restore_by_hand:
            raise ValueError(
                "restore_by_hand=True leaves predictions in the order of the view, and an attached Trainer restores "
                "that of the dataset; expected False. Pass sorted_by_length(dataset)"
            )
        args = trainer.args
        if args.world_size > 1 and is_padding_free(trainer):
            raise ValueError(
                "data_collator joins the texts of a batch into one row, from which those that fill up the last step of "
                f"world_size={args.world_size} processes could not be left out; expected the dataset itself, as there "
                "is no padding that an order could save. Evaluate view.dataset"
            )
        name = loses_order(args)
        if name is not None and not (name == "train_sampling_strategy" and reads_in_order(trainer)):
            raise ValueError(f"{name}={getattr(args, name)!r} {_LOSES_ORDER[name][1]}")

    def evaluate_in_order(
        self,
        trainer: Any,
        evaluation_loop: Callable[..., Any],
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run the Trainer's ``evaluation_loop`` over this view; return its output in dataset order with the exact loss.

        With ``batch_eval_metrics=True`` compute_metrics gets each batch as it was read, in the order of the view.

        Raises:
            ValueError: a sampler that does not read from front to back; an output of the model that has not one row
                per example.
        """
        if self._restored_for == id(dataloader):  # attached twice, around an override that is not ours
            return evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        _check_sequential(dataloader)
        restored: dict[int, Any] = {}  # by identity: what compute_metrics changes in place shows in the output, as ever

        def restore(values: Any) -> Any:
            if id(values) not in restored:
                restored[id(values)] = self.restore_order(values)
            return restored[id(values)]

        loss = _ExactLoss(trainer, len(self))
        with ExitStack() as stack:
            if trainer.compute_metrics is not None and not trainer.args.batch_eval_metrics:
                in_order = _restoring(trainer.compute_metrics, restore)
                stack.enter_context(set_attribute(trainer, "compute_metrics", in_order))
            stack.enter_context(override_method(trainer, "prediction_step", loss.prediction_step))
            # private; prediction_step calls it so in 5.8.1, 5.17.0 and 5.23.0, pinned by a test
            stack.enter_context(override_method(trainer, "_get_num_items_in_batch", loss.count))
            stack.enter_context(set_attribute(trainer.args, "average_tokens_across_devices", False))
            stack.enter_context(set_attribute(self, "_restored_for", id(dataloader)))
            loader = getattr(dataloader, "base_dataloader", dataloader)  # what accelerate's loader iterates
            stack.enter_context(set_attribute(self, "_as_columns", takes_columns(getattr(loader, "collate_fn", None))))
            stack.callback(self._reader.keep, None)
            self._reader.keep(used_columns(trainer))
            output = evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        output.metrics.update(loss.result(metric_key_prefix))
        return output._replace(predictions=restore(output.predictions), label_ids=restore(output.label_ids))


def _restoring(compute_metrics: Callable[..., Any], restore: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return ``compute_metrics`` for values in the order of the view."""

    def in_order(prediction: Any) -> Any:
        names = ("predictions", "label_ids", "inputs", "losses")
        return compute_metrics(type(prediction)(**{name: restore(getattr(prediction, name)) for name in names}))

    in_order.memopt_function = compute_metrics  # type: ignore[attr-defined]  # for what calls it on a single batch
    return in_order


def _check_sequential(dataloader: Any) -> None:
    batches = dataloader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # accelerate wraps it to pick the share of this process
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", batches)
    if not isinstance(sampler, SequentialSampler):
        raise ValueError(
            f"sampler=<{type(sampler).__name__}> reads the sorted view in an order of its own, so predictions could "
            "not be put back into dataset order; expected SequentialSampler. Leave the evaluation sampler to the "
            "Trainer, or evaluate view.dataset"
        )


class _ExactLoss:
    """Sum the loss of one evaluation over its labels: the mean loss of a batch times the number of its labels.

    Nothing is counted for the model, so that its loss is a mean over the batch whatever the head does with a count; the
    user's ``compute_loss_func`` or ``compute_loss``, which may rely on it, gets the count of this batch.
    """

    def __init__(self, trainer: Any, examples: int) -> None:
        self.trainer, self.examples = trainer, examples
        self.shifts = is_causal_lm(trainer.model)
        self._seen = 0  # rows of all processes, in reading order
        self._unit = ""
        self._losses: list[torch.Tensor] = []  # on the device, as the counts: reading them would wait for it
        self._counts: list[torch.Tensor] = []

    def count(self, before: Callable[..., Any], batches: list[Any], device: torch.device) -> Any:
        """Return the count of this batch for a user's loss; None, for the mean, where there is none."""
        if self.trainer.compute_loss_func is None and is_stock(self.trainer, "compute_loss"):
            return None
        # 5.8.1 counts the first label of a causal LM's row as well
        return self._count(batches[0]["labels"]) if self._unit == "token" else before(batches, device)

    def prediction_step(
        self, before: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Take the step and note its loss, without the rows that only fill up the last step of several processes."""
        labels = inputs.get("labels")
        if not torch.is_tensor(labels) or labels.dim() == 0:
            return before(model, inputs, *args, **kwargs)
        is_integer = not labels.is_floating_point() and labels.dtype != torch.bool
        self._unit = "token" if is_integer and labels.dim() > 1 else "example"
        rows = len(labels)
        real = self._real_rows(rows)
        output = before(model, inputs, *args, **kwargs)
        loss = output[0]
        if loss is None:
            return output
        if self._seen > self.examples:  # every process takes part, or those that shard the model would wait for it
            first = {
                name: value[: max(real, 1)] if torch.is_tensor(value) and value.shape[:1] == (rows,) else value
                for name, value in inputs.items()
            }
            loss = before(model, first, True)[0]
        self._losses.append(loss.detach().mean())
        self._counts.append(self._count(labels[:real]))
        return output

    def _real_rows(self, rows: int) -> int:
        """Return how many of the next rows of this process were not seen before: its last ones start over."""
        processes = self.trainer.accelerator.num_processes
        start: int = self._seen + self.trainer.accelerator.process_index * rows
        self._seen += processes * rows
        return min(rows, max(0, self.examples - start))

    def _count(self, labels: torch.Tensor) -> torch.Tensor:
        if labels.is_floating_point() or labels.dtype == torch.bool:
            return torch.tensor(len(labels), device=labels.device)
        return (labels[..., 1:] if self.shifts and self._unit == "token" else labels).ne(IGNORED_LABEL).sum()

    def result(self, prefix: str) -> dict[str, float]:
        """Return the exact loss of all processes under its name, or nothing if there was none."""
        if not self._losses:
            return {}
        losses, counts = (torch.stack(found).cpu().double() for found in (self._losses, self._counts))
        has_labels = counts > 0  # the mean over no labels is nan
        own = float(losses[has_labels] @ counts[has_labels]), float(counts.sum())
        summed, count = np.sum(gather_object([own]), axis=0)
        return {f"{prefix}_loss_per_{self._unit}": float(summed / count)} if count else {}
