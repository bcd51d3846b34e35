"""Which of transformers' own tests do not hold for an attached Trainer, each for a reason of its own."""

from __future__ import annotations

from fnmatch import fnmatchcase

CALLBACKS = "attached with callbacks"
SHARDS = (
    "it puts shards in place of the weights of a checkpoint, which its manifest takes for a damaged one; the message "
    "says which file to delete to resume from it unchecked"
)

KNOWN: dict[str, tuple[str, str]] = {
    "*::test_auto_batch_size_with_resume_from_checkpoint": (
        CALLBACKS,
        "auto_find_batch_size is refused beside micro-batching: both recover from out of memory, and stock's restarts "
        "the run with a smaller batch",
    ),
    "*::test_logging_inf_nan_filter": (
        CALLBACKS,
        "OverflowCallback drops steps with NaN and ends a run of nothing else; this test trains on NaN on purpose",
    ),
    "*::test_neftune": (
        CALLBACKS,
        "NEFTune is refused beside micro-batching: its noise is scaled by the padded length",
    ),
    "*::test_resume_training_with_shard_checkpoint": ("*", SHARDS),
    "*::test_resume_training_with_checkpoint": ("*", SHARDS),  # of 4.57.5
}
"""Reasons by the pattern of a test's node id: the variant ("*" for all), and the reason.

Seen with the tests of 5.6.0.dev0 (commit 357f414cae, 13 April 2026), 5.0.0.dev0 and 4.57.5, less the import of names
that are gone: what passes with stock passes attached, and what does not is here. docs/clients.md has the counts.
"""


def reason_of(test: str, variant: str) -> str | None:
    """Return why a test does not hold in a variant; None if no reason is known."""
    found = (reason for pattern, (of, reason) in KNOWN.items() if of in ("*", variant) and fnmatchcase(test, pattern))
    return next(found, None)
