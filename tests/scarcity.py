"""Models with rows of mixed lengths, and a model that runs out of memory where a test says.

Run as a program it is one of two processes, which recover each by itself; ``test_microbatch_ranks.py`` reads what they
found.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import heads
import torch
import transformers
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt.training.binding import attach
from hf_memopt.training.techniques.microbatching import MicrobatchCallback

LENGTHS = (12, 3, 7, 10, 4, 5)


class Pad:
    """Collate rows of different lengths: pad ids with 0, masks with 0 and labels with -100, and note what was asked."""

    def __init__(self, side: str = "right") -> None:
        self.side = side
        self.seen: list[list[int]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if "pixel_values" not in rows[0]:
            self.seen += [row["input_ids"] for row in rows]
        return {name: self._padded([row[name] for row in rows], -100 if name == "labels" else 0) for name in rows[0]}

    def _padded(self, values: list[Any], filler: int) -> torch.Tensor:
        if not isinstance(values[0], list):
            return torch.stack([torch.as_tensor(value) for value in values])
        longest = max(map(len, values))
        fill = [[filler] * (longest - len(value)) for value in values]
        pairs = zip(values, fill, strict=True)
        return torch.tensor([value + more if self.side == "right" else more + value for value, more in pairs])


def mixed_rows(count: int) -> list[dict[str, Any]]:
    """Return rows of mixed lengths."""
    rows = []
    for i, row in enumerate(tiny.rows(count, max(LENGTHS))):
        ids = row["input_ids"][: LENGTHS[i % len(LENGTHS)]]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": i % 3})
    return rows


def token_rows(count: int) -> list[dict[str, Any]]:
    """One label per token; every second one ignored in every third row, all in the second."""
    rows = mixed_rows(count)
    for i, row in enumerate(rows):
        ignored = 1 if i % 6 == 1 else 2 if i % 3 == 0 else 99
        row["labels"] = [-100 if j % ignored == ignored - 1 else token % 3 for j, token in enumerate(row["input_ids"])]
    return rows


def causal_rows(count: int) -> list[dict[str, Any]]:
    """Every token predicted from those before it."""
    return [{**row, "labels": row["input_ids"]} for row in mixed_rows(count)]


def seq2seq_rows(count: int) -> list[dict[str, Any]]:
    """The inputs reversed, without the first two."""
    return [{**row, "labels": row["input_ids"][:1:-1] or [5]} for row in mixed_rows(count)]


def _gpt2() -> nn.Module:
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, bos_token_id=2, eos_token_id=3))


def question_rows(count: int) -> list[dict[str, Any]]:
    """Answers from the first token to the last."""
    return [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "start_positions": 0, "end_positions": len(ids) - 1}
        for ids in (row["input_ids"] for row in mixed_rows(count))
    ]


def _bert_tokens() -> nn.Module:
    return transformers.BertForTokenClassification(tiny.bert_config())


class Case(NamedTuple):
    """A model, its rows, the padding side, and settings of the trainer."""

    build: Callable[[], nn.Module]
    rows: Callable[[int], list[dict[str, Any]]]
    side: str = "right"
    settings: dict[str, Any] = {}  # noqa: RUF012  # never changed


SMOOTHED = {"label_smoothing_factor": 0.1}
CASES = {
    "bert": Case(tiny.bert, mixed_rows),
    "roberta": Case(heads.HEADS["roberta"].build, mixed_rows),
    "bert-smoothed": Case(tiny.bert, mixed_rows, settings=SMOOTHED),
    "bert-tokens": Case(_bert_tokens, token_rows),
    "bert-questions": Case(
        lambda: transformers.BertForQuestionAnswering(tiny.bert_config(num_labels=2)), question_rows
    ),
    "llama": Case(tiny.llama, causal_rows),
    "llama-left": Case(tiny.llama, causal_rows, "left"),
    "llama-smoothed": Case(tiny.llama, causal_rows, settings=SMOOTHED),
    "gpt2": Case(_gpt2, causal_rows),
    "gpt2-left": Case(_gpt2, causal_rows, "left"),
    "t5": Case(heads.HEADS["t5"].build, seq2seq_rows),
    "vit": Case(heads.HEADS["vit"].build, heads.image_examples),
}


class Scarcity:
    """Run out of memory, as told, in the training passes of a model.

    Args:
        limit: the most padded tokens (images: rows) of a forward pass.
        calls: the forward passes, counted from 1, that run out whatever they hold.
        where: "forward" (at its beginning), "head" and "loss" (at its end, and after it), or "backward".
    """

    def __init__(self, limit: int = 10**9, calls: Iterable[int] = (), where: str = "forward") -> None:
        self.limit, self.calls, self.where = limit, set(calls), where
        self.count = 0
        self.errors = 0
        self.fails = False

    def watch(self, model: nn.Module) -> None:
        """Look at each forward and backward pass of this model, by a hook on all modules: none is on the model."""
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._model, self._head = weakref.ref(model), weakref.ref(linear[-1])
        inside = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
        first = (module for module in inside.modules() if isinstance(module, (nn.Embedding, nn.Conv2d)))
        self._first = weakref.ref(next(first))
        handle = nn.modules.module.register_module_forward_pre_hook(self._before_forward)
        weakref.finalize(model, handle.remove)
        after = nn.modules.module.register_module_forward_hook(self._after_forward)
        weakref.finalize(model, after.remove)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is self._model() and self.fails and self.where == "loss":
            self.fail()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        model = self._model()
        if model is None or not (model.training and torch.is_grad_enabled()):
            return
        if module is self._first():
            self.count += 1
            held = args[0].numel() if isinstance(module, nn.Embedding) else len(args[0])
            self.fails = held > self.limit or self.count in self.calls
            if self.fails and self.where == "forward":
                self.fail()
        if module is self._head() and self.fails and self.where == "head":  # late, where activations are there already
            self.fail()
        if module is self._head() and self.fails and self.where == "backward" and args[0].requires_grad:
            args[0].register_hook(self._in_backward)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        if self.fails:
            self.fail()

    def fail(self) -> None:
        """Run out of memory, as a GPU would."""
        self.fails = False
        self.errors += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity")


# ---- As one of two processes ----------------------------------------------------------------------------------------

RANK = int(os.environ.get("RANK", 0))

# What runs out of memory where. Alone: one process only, the other one runs whole batches.
WAYS: dict[str, Scarcity | None] = {
    "whole": None,
    "alone, forward": Scarcity(limit=24) if RANK == 1 else Scarcity(),
    "both, forward": Scarcity(limit=24),
    # the second of two micro-batches runs whole: its backward pass shares gradients; the first one's does not
    "alone, backward of the first": Scarcity(calls=(1,), where="backward") if RANK == 1 else Scarcity(),
    # after the model's forward pass, in the loss: the synchronising pass must not have been announced
    "alone, loss": Scarcity(calls=(2, 6), where="loss") if RANK == 1 else Scarcity(),
}

TRIED = {"bert": tuple(WAYS)[1:], "llama": ("alone, forward", "alone, loss")}


def _train(name: str, way: str, folder: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    case, scarcity = CASES[name], WAYS[way]
    model = case.build()
    if scarcity is not None:
        scarcity.watch(model)
    arguments = tiny.arguments(
        folder,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        max_steps=3,
        **{**tiny.DDP, **settings},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=case.rows(72), data_collator=Pad())
    callback = MicrobatchCallback()
    attach(trainer, *([] if scarcity is None else [callback]))
    trainer.train()
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    return trainer, callback, scarcity


def main(folder: str) -> None:
    """Write how far each way is from the run of whole batches, and how often memory ran out."""
    gc.freeze()  # the Trainer collects garbage at the start of each run, and each recovery does
    found: dict[str, Any] = {}
    for name, ways in TRIED.items():
        whole, _, _ = _train(name, "whole", folder)
        for way in ways:
            trainer, callback, scarcity = _train(name, way, folder)
            difference = tiny.largest_difference(whole.model, trainer.model)
            found[f"{name}: {way}"] = [difference, scarcity.errors, callback.limits["max_tokens"].limit]
            scarcity.count = scarcity.errors = 0
    WAYS["shared"] = Scarcity(calls=(2,), where="backward")
    try:
        _train("bert", "shared", folder)
    except torch.OutOfMemoryError as error:
        found["shared"] = str(error)
    try:
        _train("bert", "whole", folder, ddp_broadcast_buffers=None)
        _train("bert", "both, forward", folder, ddp_broadcast_buffers=None)
    except ValueError as error:
        found["flags"] = str(error)
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
