"""Find out how the losses of a batch's micro-batches add up to the loss of the batch, by asking the loss itself.

A loss is either a sum (divided by a count that was passed in, ``num_items_in_batch``), so that the losses of parts
simply add up, or a mean: over rows, over labels, or weighted by another column of the batch, so that each part weighs
as much as its share of that count. No attribute of a model says reliably which one it is: BERT's heads accept the count
and ignore it. A few rows of a real batch show it, run together and each alone, by their losses and their gradients (an
untrained model has much the same loss for every row, so losses alone would show little).

One probe proves little: if all rows have as many boxes, a mean over rows looks like one over boxes. So ``LossWeights``
remembers which inputs are known not to be weights, and probes again before a batch is split whose rows differ in any
other. It also probes again as the weights move away from where they began (a policy that equals its reference, adapters
of zeros), after 1, 3, 7, 15 ... optimizer steps.

Limitations: a weight that depends on no single input (a product of two columns, the classes of tokens) is seen only if
the rows of a probe differ in it. Where two rows do not fit into memory, single rows show only whether losses add up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hf_memopt.binding.model_traits import IGNORED_LABEL, is_causal_lm
from hf_memopt.devices.out_of_memory import free_failed_step
from hf_memopt.notices import notify
from hf_memopt.techniques.microbatching.probed_loss import Items, NotSplittableError, ProbedLoss, Reading
from hf_memopt.techniques.microbatching.row_counts import Counts, row_counts, row_shares, spread
from hf_memopt.techniques.microbatching.splitting import row_count, row_lengths, take_rows

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["LEAST_LOSS", "LossWeights", "tolerances"]

logger = logging.getLogger(__name__)

PROBE_ROWS = 3
LEAST_LOSS = 1e-6  # below it, rounding of float32 is as large as the loss

# The largest relative error that is tolerated: of a loss, of a gradient.
FLOAT32 = (1e-4, 1e-3)  # sums in another order, over shorter rows
AUTOCAST = (3e-3, 5e-2)  # logits of 16 bits, losses of 32
SIXTEEN_BITS = (3e-2, 1e-1)  # losses of bfloat16, which has 8 bits


class LossWeights:
    """Find and remember the count by which the loss of one trainer weighs the rows of its batches.

    Attributes:
        rule: ``"sum"`` or a name of ``row_counts``; None until a batch has shown it.
    """

    def __init__(self) -> None:
        self.rule: str | None = None
        self._excluded: set[str] = set()  # counts that are known not to be the weights
        self._too_long: float = math.inf  # length of the shorter of two rows that did not fit into memory together
        self._assumed: str | None = None
        self._asked_at, self._ask_again_at = 0, 0  # optimizer steps

    def of_rows(
        self,
        trainer: Trainer,
        model: nn.Module,
        inputs: Mapping[str, Any],
        num_items_in_batch: Items,
        most_rows: int = PROBE_ROWS,
    ) -> list[float] | None:
        """Return how much each row of a batch weighs in its mean, shape (rows,); None if the losses of rows add up.

        The loss is probed as long as the rows of this batch differ in a count that may still be the weight.

        Args:
            trainer: its ``compute_loss`` is probed; the trainer, its model and all random numbers stay as they are.
            model: as ``training_step`` gets it.
            inputs: the batch.
            num_items_in_batch: as ``training_step`` gets it.
            most_rows: how many rows fit into memory at once.

        Raises:
            NotSplittableError: no weights give the loss of a few rows from the losses of each.
        """
        counts, asked = row_counts(inputs), ProbedLoss(trainer, model, num_items_in_batch)
        step = trainer.state.global_step
        if self.rule is not None and step >= self._ask_again_at:
            self._probe(asked, inputs, counts, most_rows)
            self._asked_at, self._ask_again_at = step, step + 2 * max(step - self._asked_at, 1)
        before = -1
        while len(candidates := self._candidates(counts)) not in (0, before):
            before = len(candidates)
            self._probe(asked, inputs, counts, most_rows)
        rule = self.rule or self._assume(asked, inputs, most_rows)
        return None if rule == "sum" else row_shares(rule, counts).tolist()

    def ask(self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Items) -> None:
        """Probe once with rows of a batch that need not be split, so that what cannot be split is refused at once.

        Raises:
            NotSplittableError: as ``of_rows``; with a ``__cause__`` if it was an error of the loss itself.
        """
        self._probe(ProbedLoss(trainer, model, num_items_in_batch), inputs, row_counts(inputs), PROBE_ROWS)

    def _candidates(self, counts: Counts) -> set[str]:
        """Return the counts that are not excluded and would give the rows of this batch other weights."""
        if len(counts["rows"]) < 2:
            return set()
        if self.rule is None:
            return set(counts)
        weights = row_shares(self.rule, counts)
        return {name for name, values in counts.items() if name not in self._excluded and spread(values, weights).any()}

    def _probe(self, asked: ProbedLoss, inputs: Mapping[str, Any], counts: Counts, most_rows: int) -> None:
        """Probe with a few rows; with two if three do not fit into memory, and then without their gradients."""
        lengths = row_lengths(inputs) or [1] * row_count(inputs)
        rows = self._probe_rows(counts, lengths, min(most_rows, PROBE_ROWS))
        if len(rows) < 2 or lengths[rows[-2]] >= self._too_long:
            return
        for chosen, with_gradient in dict.fromkeys([(rows, True), (rows[-2:], True), (rows[-2:], False)]):
            probe = take_rows(inputs, chosen)
            if self.rule is None:
                probe = _with_uneven_labels(probe)
            readings = asked.at_once_and_alone(probe, with_gradient=with_gradient)
            if readings is not None:
                self._learn(asked, probe, readings)
                return
            free_failed_step()  # the except block has ended, and with it the frames that referred to the tensors
        self._too_long = lengths[rows[-2]]

    def _probe_rows(self, counts: Counts, lengths: Sequence[int], most_rows: int) -> tuple[int, ...]:
        """Return short rows that differ in as many candidates as possible, the longest of them first."""
        candidates = self._candidates(counts)
        rows = sorted(range(len(lengths)), key=lambda row: lengths[row])
        if self.rule is None and "labels" in counts:
            rows = [row for row in rows if counts["labels"][row] and counts["shifted labels"][row]]
        weights = row_shares(self.rule or "rows", counts)
        chosen = rows[:1]
        while 0 < len(chosen) < min(most_rows, len(rows)):

            def gain(row: int, chosen: list[int] = chosen) -> tuple[int, int]:
                both = [*chosen, row]
                return sum(bool(spread(counts[name][both], weights[both]).any()) for name in candidates), -lengths[row]

            chosen = [*chosen, max((row for row in rows if row not in chosen), key=gain)]
        return tuple(sorted(chosen, key=lambda row: -lengths[row]))

    def _learn(self, asked: ProbedLoss, probe: Mapping[str, Any], readings: list[Reading]) -> None:
        """Take the rule by which the readings of single rows give the reading of all rows.

        Several rules may fit, e.g. if all rows have as many labels. The one known so far is kept if it fits, else the
        likeliest is taken; every other count by which the reading would have come out differently is excluded, and
        only counts that are not excluded make a later batch worth another probe.
        """
        whole, *parts = readings
        is_nothing = abs(float(whole.loss)) < LEAST_LOSS and not whole.gradient.any()
        if is_nothing or not math.isfinite(float(whole.loss)):
            return
        counts, tolerance = row_counts(probe), tolerances(asked.trainer, whole.loss)
        rules = [rule for rule in _rules(asked.trainer.model, counts) if rule not in self._excluded]
        errors = {rule: _error(whole, parts, row_shares(rule, counts), tolerance) for rule in rules}
        least = min(errors.values())
        if least > 1:
            raise NotSplittableError(asked.trainer.model, _reason(asked, probe, readings))
        noise = max(1e-6, 2 * torch.finfo(whole.loss.dtype).eps) / tolerance[0]
        fitting = [rule for rule, error in errors.items() if error <= 4 * least + noise]
        if self.rule is None:
            step = asked.trainer.state.global_step
            self._asked_at, self._ask_again_at = step, step + 1
        if self.rule not in fitting:
            self.rule = fitting[0]
        shares = row_shares(self.rule, counts)  # (rows,)
        for name, values in counts.items():
            # Shares as they would be if this count had a part in them: larger by up to 2 where the count per share is
            # larger, and above 0 where a row without a share has a count. Do the readings rule them out?
            other = np.maximum(shares, shares.mean() * (shares == 0)) * (1 + spread(values, shares))  # (rows,)
            if self.rule != "sum":
                other /= other.sum()
            if spread(values, shares).any() and _error(whole, parts, other, tolerance) > max(1, 4 * least):
                self._excluded.add(name)

    def _assume(self, asked: ProbedLoss, inputs: Mapping[str, Any], most_rows: int) -> str:
        """Return the rule that stock assumes, for a batch that does not show it: its loss is 0, or only single rows fit
        into memory, which show no more than whether the loss is a sum.
        """
        trainer = asked.trainer
        counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        is_sum = counts and asked.items is not None
        if most_rows > 1 and self._too_long == math.inf:
            return "sum" if is_sum else "labels"
        if self._assumed is None:
            self._assumed = "sum" if is_sum and asked.halves(inputs) else "labels"
            how = "a sum" if self._assumed == "sum" else "a mean over labels"
            notify(
                logger,
                f"only single rows fit into memory, which do not show how the losses of {type(trainer.model).__name__} "
                f"add up; taken for {how}",
            )
        return self._assumed


def _rules(model: nn.Module, counts: Counts) -> list[str]:
    """Return the rules, the likelier first where two give the same: causal language models shift their labels."""
    by_model = ["shifted labels", "labels", "rows"] if is_causal_lm(model) else ["labels", "rows", "shifted labels"]
    return ["sum", *(name for name in dict.fromkeys([*by_model, *counts]) if name in counts)]


def _with_uneven_labels(probe: dict[str, Any]) -> dict[str, Any]:
    """Ignore the later half of the first row's labels if it has a sequence of them; at least two stay.

    Otherwise a batch whose rows all have as many labels could not show whether the loss is a mean over labels.
    """
    labels = probe.get("labels")
    if not torch.is_tensor(labels) or labels.is_floating_point() or labels.dim() != 2 or "shift_labels" in probe:
        return probe
    counted = (labels[0] != IGNORED_LABEL).nonzero().flatten()
    fewer = labels.clone()
    fewer[0, counted[max(2, len(counted) // 2) :]] = IGNORED_LABEL
    return {**probe, "labels": fewer}


# ---- Comparing ------------------------------------------------------------------------------------------------------


def _error(
    whole: Reading, parts: Sequence[Reading], shares: NDArray[np.float64], tolerance: tuple[float, float]
) -> float:
    """Return the error of the weighted parts against the whole, in units of the tolerance; infinite if it is NaN.

    ``shares`` has shape (rows,), a gradient (elements,).
    """
    weighted = [(float(share), part) for share, part in zip(shares, parts, strict=True) if share != 0]
    losses = [share * float(part.loss) for share, part in weighted]
    of_loss = abs(float(whole.loss) - sum(losses)) / max(abs(float(whole.loss)), *map(abs, losses), LEAST_LOSS)
    error = of_loss / tolerance[0]
    if whole.gradient.any():
        gradients = [share * part.gradient for share, part in weighted]
        scale = max(float(gradient.norm()) for gradient in [whole.gradient, *gradients])
        error = max(error, float((whole.gradient - sum(gradients)).norm()) / scale / tolerance[1])
    return error if math.isfinite(error) else math.inf


def tolerances(trainer: Any, loss: torch.Tensor) -> tuple[float, float]:
    """Return the largest relative error that is tolerated of a loss, and of a gradient."""
    if loss.dtype in (torch.float16, torch.bfloat16):
        return SIXTEEN_BITS
    is_narrow = trainer.args.bf16 or trainer.args.fp16 or any(p.element_size() < 4 for p in trainer.model.parameters())
    return AUTOCAST if is_narrow else FLOAT32


def _reason(asked: ProbedLoss, probe: Mapping[str, Any], readings: list[Reading]) -> str:
    """Return why no rule gives the loss of the rows of a probe from those of each."""
    whole, *parts = readings
    tolerance = tolerances(asked.trainer, whole.loss)
    again = asked.twice(probe)
    if again is not None and _error(again[0], again[1:], np.ones(1), tolerance) > 1:
        return "its loss is random in evaluation mode too (masks or noise), so parts cannot be compared with the whole"
    if all(abs(float(part.loss)) < LEAST_LOSS for part in parts):
        at_once = f"the loss of {len(parts)} rows at once is {float(whole.loss):.4g}"
        return f"{at_once} and that of each alone 0, as with in-batch negatives"
    if whole.gradient.any():
        columns = torch.stack([part.gradient for part in parts], dim=1).double().cpu()  # (elements, rows)
        found = torch.linalg.lstsq(columns, whole.gradient.double().cpu()[:, None]).solution[:, 0].numpy()
        if _error(whole, parts, found, tolerance) <= 1:
            shown = " : ".join(f"{share:.3g}" for share in found)
            return f"it weighs rows by {shown}, which nothing in the batch gives, as weights of classes do"
    shown = " + ".join(f"{float(part.loss):.4g}" for part in parts)
    return (
        f"the loss of {len(parts)} rows at once is {float(whole.loss):.4g}, which no weighting of their own losses "
        f"({shown}) gives, as with a penalty over the whole batch or means over different counts"
    )
