"""How good the answers of a model are, for ``compute_metrics``, in numpy alone.

Each function takes the predictions that ``kept_predictions`` leaves of the logits, so that an evaluation keeps one
number for each row or token instead of one for each class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import EvalPrediction

__all__ = ["BEST", "kept_predictions", "metrics_of"]

IGNORED = -100
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
    return {
        "single_label_classification": _classification,
        "image-classification": _classification,
        "multi_label_classification": _several_classes,
        "regression": _regression,
        "token-classification": _token_classification,
        "question-answering": _spans,
    }.get(kind)


def kept_predictions(kind: str) -> Callable[[Any, Any], torch.Tensor] | None:
    """Return ``preprocess_logits_for_metrics``, which leaves of the logits what ``metrics_of`` reads; None for all."""
    if kind in ("single_label_classification", "image-classification", "token-classification", "question-answering"):
        return _most_likely
    return None


def _most_likely(logits: Any, labels: Any) -> Any:
    """Return the most likely class of each row or token; of each output where a model has several of one shape."""
    if isinstance(logits, tuple | list):
        if isinstance(labels, tuple | list):  # a start and an end
            return tuple(one.argmax(dim=-1) for one in logits[: len(labels)])
        logits = logits[0]
    return logits.argmax(dim=-1)


def _f1(found: NDArray[Any], right: NDArray[Any]) -> float:
    """Return the mean over the classes of F1, the harmonic mean of precision and recall.

    Args:
        found: predicted classes, shape (rows,).
        right: their labels, shape (rows,).
    """
    scores = []
    for one in np.union1d(found, right):
        both = np.sum((found == one) & (right == one))
        scores.append(2 * both / (np.sum(found == one) + np.sum(right == one)))
    return float(np.mean(scores)) if scores else 0.0


def _classification(given: EvalPrediction) -> dict[str, float]:
    found, right = np.asarray(given.predictions), np.asarray(given.label_ids)
    return {"accuracy": float((found == right).mean()), "f1": _f1(found, right)}


def _token_classification(given: EvalPrediction) -> dict[str, float]:
    """Accuracy and F1 of the tokens that have a label."""
    found, right = np.asarray(given.predictions), np.asarray(given.label_ids)
    counted = right != IGNORED
    found, right = found[counted], right[counted]
    return {"accuracy": float((found == right).mean()) if right.size else 0.0, "f1": _f1(found, right)}


def _several_classes(given: EvalPrediction) -> dict[str, float]:
    """The share of rows with all classes right, and F1 over all classes of all rows."""
    found, right = np.asarray(given.predictions) > 0, np.asarray(given.label_ids) > 0.5
    wanted = found.sum() + right.sum()
    return {
        "accuracy": float((found == right).all(axis=-1).mean()),
        "f1": float(2 * (found & right).sum() / wanted) if wanted else 0.0,
    }


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
    ids = given.predictions[0] if isinstance(given.predictions, tuple) else given.predictions
    found, right = np.asarray(ids), np.asarray(given.label_ids)
    pad = tokenizer.pad_token_id
    texts = [
        tokenizer.batch_decode(np.where(one == IGNORED, pad, one), skip_special_tokens=True) for one in (found, right)
    ]
    same = [a.strip() == b.strip() for a, b in zip(*texts, strict=True)]
    lengths = ((found != pad) & (found != IGNORED)).sum(axis=-1)
    return {"exact_match": float(np.mean(same)), "generated_tokens": float(lengths.mean())}
