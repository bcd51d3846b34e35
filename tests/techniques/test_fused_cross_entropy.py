"""The fused cross entropy under the real ``Trainer``: with other techniques, in evaluation, saved; what it records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import slow_except
from transformers import Trainer, default_data_collator

import tiny
from hf_memopt import FusedCrossEntropyCallback, MicrobatchCallback, attach, low_memory_optimizer
from hf_memopt.training.binding import checkpointing_arguments

FUSED = (
    "cross entropy: 'logits of the whole batch' -> 'chunks of at most 1.6 KiB of logits' "
    "(lm_head and the loss are one operation over labelled rows)"
)
CHUNK_BYTES = 100 * 4 * 4  # 4 rows


def texts(count: int = 16) -> list[dict[str, Any]]:
    """Rows of 12 tokens, the first 1 to 4 without a label."""
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in tiny.rows(count)]
    return [row | {"labels": [-100] * (i % 4 + 1) + row["input_ids"][i % 4 + 1 :]} for i, row in enumerate(rows)]


def trained(folder: Any, *callbacks: Any, model: Any = None, given: Any = None, **settings: Any) -> Any:
    """Return an attached Trainer that has made 4 steps."""
    asked = {"max_steps": 4, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", **settings}
    trainer = Trainer(
        model=tiny.llama() if model is None else model,
        args=tiny.arguments(folder, **asked),
        train_dataset=texts(),
        eval_dataset=texts(8),
        data_collator=default_data_collator,
        callbacks=list(callbacks),
        **(given or {}),
    )
    attach(trainer).train()
    return trainer


def fused() -> FusedCrossEntropyCallback:
    return FusedCrossEntropyCallback(chunk_bytes=CHUNK_BYTES)


def changes(trainer: Any) -> list[str]:
    """Return what was recorded of the loss."""
    return [str(change) for change in trainer.memopt_changes if "cross entropy" in change.name]


COMBINED: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": checkpointing_arguments(use_reentrant=False),
    "reentrant checkpointing": checkpointing_arguments(use_reentrant=True),
    "gradient release": {
        "given": {"optimizer_cls_and_kwargs": (low_memory_optimizer(torch.optim.SGD, release=True), {"lr": 0.1})}
    },
    "norm clipping": {"max_grad_norm": 0.1},
    "tied": {"model": {"tie_word_embeddings": True}},
    "micro-batches": {"callbacks": [MicrobatchCallback(max_tokens=24)]},
    "whole micro-batches": {"callbacks": [MicrobatchCallback()]},
}
QUICK = ("accumulation", "gradient release", "micro-batches")


@pytest.mark.parametrize("name", slow_except(QUICK, COMBINED))
def test_training_gives_stocks_weights(name: str, tmp_path: Any) -> None:
    settings = dict(COMBINED[name])
    of_model, callbacks = settings.pop("model", {}), settings.pop("callbacks", [])
    plain = trained(tmp_path, model=tiny.llama(**of_model), **settings)
    trainer = trained(tmp_path, fused(), *callbacks, model=tiny.llama(**of_model), **settings)
    assert changes(trainer) == [FUSED]
    assert tiny.largest_difference(trainer.model, plain.model) <= 1e-6  # roundings of float32, in chunks


def test_evaluation_sees_real_logits_and_the_best_model_is_loaded(tmp_path: Any) -> None:
    kinds: set[type] = set()

    def preprocess(logits: Any, labels: Any) -> Any:
        kinds.add(type(logits))
        return logits.argmax(-1)

    given = {
        "compute_metrics": lambda found: {"accuracy": float(np.mean(found.predictions == found.label_ids))},
        "preprocess_logits_for_metrics": preprocess,
    }
    saving = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    saving |= {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    plain = trained(tmp_path / "plain", given=given, **saving)
    trainer = trained(tmp_path / "fused", fused(), given=given, **saving)
    assert kinds == {torch.Tensor}
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.evaluate()["eval_accuracy"] == plain.evaluate()["eval_accuracy"]
    assert tiny.largest_difference(trainer.model, plain.model) <= 1e-6
    loaded = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    assert tiny.largest_difference(loaded, trainer.model) == 0.0


@pytest.mark.parametrize("settings", [{}, {"bf16": True, "use_cpu": True}], ids=["fp32", "bf16"])
def test_an_evaluation_of_the_loss_alone_has_stocks_loss_bit_for_bit_and_no_logits(
    settings: Any, tmp_path: Any
) -> None:
    makers = {"eval_dataset": texts(8), "data_collator": default_data_collator}
    args = tiny.arguments(tmp_path, per_device_eval_batch_size=4, **settings)
    plain = Trainer(model=tiny.llama(), args=args, **makers)
    trainer = attach(Trainer(model=tiny.llama(), args=args, callbacks=[callback := fused()], **makers))
    assert callback.handle is not None
    seen: list[type] = []
    trainer.model.register_forward_hook(lambda module, given, output: seen.append(type(output["logits"])))
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]  # 12 chunks of 4 rows a batch
    assert len(seen) == 2
    assert torch.Tensor not in seen
    assert not callback.handle.record.real
    predicted, expected = trainer.predict(texts(8)), plain.predict(texts(8))  # which wants the logits
    assert np.array_equal(predicted.predictions, expected.predictions)


def test_label_smoothing_of_the_trainer_makes_real_logits_and_says_so(tmp_path: Any) -> None:
    plain = trained(tmp_path, label_smoothing_factor=0.1)
    with pytest.warns(UserWarning, match="fused no loss") as warned:
        trainer = trained(tmp_path, fused(), label_smoothing_factor=0.1)
    assert [str(one.message) for one in warned] == [
        "FusedCrossEntropyCallback fused no loss in a training step (log_softmax); expected cross_entropy of the "
        "head's logits. Take it out of callbacks=, or see trainer.memopt_changes for what made real logits"
    ]
    assert changes(trainer) == [
        "fused cross entropy: 'no logits' -> 'real logits' "
        "(log_softmax reads them: label smoothing by the Trainer, or a loss of the user's)"
    ]
    assert tiny.largest_difference(trainer.model, plain.model) == 0.0


def _penalised(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss and a penalty on its gradient by the logits."""
    logits = outputs.logits[:, :-1].reshape(-1, 100)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1))
    return loss + 100 * torch.autograd.grad(loss, logits, create_graph=True)[0].pow(2).sum()


def test_a_gradient_that_is_differentiated_is_that_of_real_logits_and_is_noted_once(tmp_path: Any) -> None:
    given = {"compute_loss_func": _penalised}
    plain, trainer = trained(tmp_path, given=given), trained(tmp_path, fused(), given=given)
    assert changes(trainer) == [
        FUSED,
        "fused cross entropy: 'no logits' -> 'real logits' (grad reads or changes them)",
        "fused cross entropy: 'no logits' -> 'real logits' "
        "(a second derivative (create_graph=True) reads or changes them)",
    ]
    assert tiny.largest_difference(trainer.model, plain.model) <= 1e-6
    unpenalised = trained(tmp_path)
    assert tiny.largest_difference(plain.model, unpenalised.model) > 1e-4


def test_autocast_and_its_float32_outputs(tmp_path: Any) -> None:
    """Accelerate makes float32 copies of all outputs, which are remembered as well."""
    trainer = trained(tmp_path, fused(), bf16=True)
    assert changes(trainer) == [FUSED]
