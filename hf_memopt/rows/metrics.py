"""How good the answers of a model are, for ``compute_metrics``, in numpy alone.

Each function takes the predictions that ``kept_predictions`` leaves of the logits, so that an evaluation keeps one
number for each row or token instead of one for each class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import EvalPrediction

__all__ = ["BEST", "kept_predictions", "metrics_of"]

IGNORED = -100
CLASSES = ("single_label_classification", "image-classification", "token-classification", "question-answering")
BEST = {
    **dict.fromkeys(("single_label_classification", "multi_label_classification", "token-classification"), "f1"),
    "regression": "pearson",
    "question-answering": "exact_match",
}
"""By what checkpoints are compared; of texts, which are seldom the same in all words, it is the loss."""


def metrics_of(kind: str, tokenizer: Any = None) -> Callable[[EvalPrediction], dict[str, float]] | None:
    """Return ``compute_metrics`` for a kind of rows; None where the loss says it all, as of a language model.

    Args:
        kind: transformers' ``problem_type``, or a task: "token-classification", "question-answering", "seq2seq".
        tokenizer: reads what was generated.
    """
    if kind in ("seq2seq", "speech-seq2seq"):
        return partial(_generation, tokenizer=tokenizer)
    others = {"multi_label_classification": _several_classes, "regression": _regression, "question-answering": _spans}
    return others.get(kind, _classes if kind in CLASSES else None)


def kept_predictions(kind: str) -> Callable[[Any, Any], Any] | None:
    """Return ``preprocess_logits_for_metrics``, which leaves of the logits what ``metrics_of`` reads; None for all."""
    if kind in ("regression", "multi_label_classification"):
        return _of_head
    return _most_likely if kind in CLASSES else None


def _of_head(logits: Any, labels: Any) -> Any:
    """Return the logits of the head, where a model has other outputs too."""
    return logits[0] if isinstance(logits, tuple | list) else logits


def _most_likely(logits: Any, labels: Any) -> Any:
    """Return the most likely class of each row or token, or the most likely start and end."""
    if isinstance(labels, tuple | list):
        return tuple(one.argmax(dim=-1) for one in logits[: len(labels)])
    return _of_head(logits, labels).argmax(dim=-1)


def _classes(given: EvalPrediction) -> dict[str, float]:
    """The share of the rows, or of the tokens with a label, that are right, and the mean of F1 over the classes."""
    found, right = np.asarray(given.predictions), np.asarray(given.label_ids)
    found, right = found[right != IGNORED], right[right != IGNORED]
    if not right.size:
        return {"accuracy": 0.0, "f1": 0.0}
    scores = [_f1(found == one, right == one) for one in np.union1d(found, right)]
    return {"accuracy": float((found == right).mean()), "f1": float(np.mean(scores))}


def _f1(found: NDArray[Any], right: NDArray[Any]) -> float:
    """Return the harmonic mean of precision and recall of what is found, both booleans of one shape."""
    wanted = found.sum() + right.sum()
    return float(2 * (found & right).sum() / wanted) if wanted else 0.0


def _several_classes(given: EvalPrediction) -> dict[str, float]:
    """The share of rows with all classes right, and F1 over all classes of all rows."""
    found, right = np.asarray(given.predictions) > 0, np.asarray(given.label_ids) > 0.5
    return {"accuracy": float((found == right).all(axis=-1).mean()), "f1": _f1(found, right)}


def _regression(given: EvalPrediction) -> dict[str, float]:
    """Pearson's correlation, and the root of the mean squared error."""
    found, right = np.ravel(given.predictions).astype(np.float64), np.ravel(given.label_ids).astype(np.float64)
    varies = len(found) > 1 and found.std() > 0 and right.std() > 0
    pearson = float(np.corrcoef(found, right)[0, 1]) if varies else 0.0
    return {"pearson": pearson, "rmse": float(np.sqrt(np.mean((found - right) ** 2)))}


def _spans(given: EvalPrediction) -> dict[str, float]:
    """The share of rows whose answer starts and ends at the right tokens."""
    found, right = (np.stack([np.asarray(one) for one in pair]) for pair in (given.predictions, given.label_ids))
    return {"exact_match": float((found == right).all(axis=0).mean())}


def _generation(given: EvalPrediction, tokenizer: Any) -> dict[str, float]:
    """The share of texts that are generated as they should be, and how many tokens are generated."""
    found, right = np.asarray(_of_head(given.predictions, None)), np.asarray(given.label_ids)
    pad = tokenizer.pad_token_id
    ids = [np.where(one == IGNORED, pad, one) for one in (found, right)]
    texts = [tokenizer.batch_decode(one, skip_special_tokens=True) for one in ids]
    same = [one.strip() == other.strip() for one, other in zip(*texts, strict=True)]
    lengths = ((found != pad) & (found != IGNORED)).sum(axis=-1)
    return {"exact_match": float(np.mean(same)), "generated_tokens": float(lengths.mean())}
