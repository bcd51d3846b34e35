"""How good the answers of a model are, for ``compute_metrics``, in numpy alone.

Each function takes the predictions that ``kept_predictions`` leaves of the logits, so that an evaluation keeps one
number for each row or token instead of one for each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import EvalPrediction

IGNORED = -100


def metric_of(kind: str, tokenizer: Any = None) -> dict[str, Any]:
    """Return ``metrics``, ``kept_predictions`` and ``best_metric`` of ``Rows``; those left out have their defaults.

    Checkpoints of texts are compared by the loss: a text is seldom the same in all words.
    """
    found: Mapping[str, tuple[Any, ...]] = {
        "single_label_classification": (_classes, _most_likely, "f1"),
        "token-classification": (_classes, _most_likely, "f1"),
        "multi_label_classification": (_several_classes, _of_head, "f1"),
        "regression": (_regression, _of_head, "pearson"),
        "question-answering": (_spans, _most_likely, "exact_match"),
        "seq2seq": (partial(_generation, tokenizer=tokenizer),),
    }
    return dict(zip(("metrics", "kept_predictions", "best_metric"), found.get(kind, ()), strict=False))


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
    if found.dtype.kind == "f":
        raise ValueError(
            f"predictions=<{found.dtype} of shape {found.shape}> are logits, and this metric compares texts; expected "
            "generated tokens. Evaluate with Seq2SeqTrainer and Seq2SeqTrainingArguments(..., "
            "predict_with_generate=True), or leave compute_metrics out"
        )
    pad = tokenizer.pad_token_id
    ids = [np.where(one == IGNORED, pad, one) for one in (found, right)]
    texts = [tokenizer.batch_decode(one, skip_special_tokens=True) for one in ids]
    same = [one.strip() == other.strip() for one, other in zip(*texts, strict=True)]
    lengths = ((found != pad) & (found != IGNORED)).sum(axis=-1)
    return {"exact_match": float(np.mean(same)), "generated_tokens": float(lengths.mean())}
