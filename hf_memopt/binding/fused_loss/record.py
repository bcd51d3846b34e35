"""What became of the logits of a fused model: how often they were fused with the loss, and what made them real."""

from __future__ import annotations

from collections import Counter

from hf_memopt.changes import Change

__all__ = ["FusionRecord"]


class FusionRecord:
    """Counts of one fused model.

    Attributes:
        fused: losses that were computed without logits.
        real: how often each operation of the training forward pass made real logits, by its name.
        warned: whether the user was told that nothing was fused.
    """

    def __init__(self, layers: str, chunks: str) -> None:
        self.fused = 0
        self.real: Counter[str] = Counter()
        self.warned = False
        self._layers, self._chunks = layers, chunks

    def note_fused(self) -> None:
        """Count a loss without logits."""
        self.fused += 1

    def note(self, operation: str) -> None:
        """Count an operation that needed the real logits."""
        self.real[operation] += 1

    def changes(self) -> list[Change]:
        """Return what was done so far, one ``Change`` for each kind."""
        found = []
        if self.fused:
            reason = f"{self._layers} and the loss are one operation over labelled rows"
            found.append(Change("cross entropy", "logits of the whole batch", self._chunks, reason))
        for operation in self.real:
            found.append(Change("fused cross entropy", "no logits", "real logits", _reason(operation)))
        return found


def _reason(operation: str) -> str:
    """Return why an operation needs the elements of the logits."""
    if operation == "cross_entropy":
        return (
            "cross_entropy was called with class weights, probabilities, reduction='none' or more than two dimensions"
        )
    if operation == "log_softmax":
        return "log_softmax reads them: label smoothing by the Trainer, or a loss of the user's"
    return f"{operation} reads or changes them"
