"""The losses of TRL's trainers, with stand-ins of their names: TRL itself is in ``tests/clients/test_estimates.py``."""

from __future__ import annotations

import functools
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from recorded import allocator_peak, replayed_peak
from test_host_oracle import HostSemantics
from transformers import Trainer

import tiny
from hf_memopt import estimate
from hf_memopt.prediction.memory import estimate_of
from hf_memopt.prediction.memory.models import example_batch, load_model
from hf_memopt.prediction.memory.optimizers import optimizer_memory, parameter_facts
from hf_memopt.prediction.memory.recording import trainer_loss
from hf_memopt.prediction.memory.recording.step import record_step
from hf_memopt.prediction.memory.settings import BatchShape, NotEstimableError
from hf_memopt.types import StepSettings

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # torch 2.13
EXAMPLES, LENGTH = 8, 32
SIZES = {"vocab_size": 2000, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 256}


class Reward(Trainer):
    """What ``RewardTrainer`` of TRL 1.16 does with a batch."""

    __module__ = "trl.trainer.reward_trainer"

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), chunks=2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        self._metrics["train"]["least"].append(self.accelerator.gather(outputs.logits).min().item())
        return (loss, outputs) if return_outputs else loss


class Preferences(Trainer):
    """What ``DPOTrainer`` does, with logits."""

    __module__ = "trl.trainer.dpo_trainer"

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        taken = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, 0)
        own = self.of_answers(model(**taken).logits, labels)
        with torch.no_grad():
            reference = self.of_answers(self.ref_model(**taken).logits, labels)
        chosen, rejected = (own - reference).chunk(2)
        if self.accelerator.gather_for_metrics(labels.sum()).sum() > 0:
            self._metrics["train"]["margin"].append(self.accelerator.gather((chosen - rejected).mean()).item())
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    @staticmethod
    def of_answers(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, -1)[:, :-1].gather(2, labels[:, 1:, None]).squeeze(2).sum(1)


class Supervised(Trainer):
    """An ``SFTTrainer`` that notes its batches."""

    __module__ = "trl.trainer.sft_trainer"
    padding_free = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        self.seen.append({name: tuple(one.shape) for name, one in inputs.items()})
        return model(**inputs).loss


Reward.__name__, Preferences.__name__, Supervised.__name__ = "RewardTrainer", "DPOTrainer", "SFTTrainer"


def llama(kind: Any = transformers.LlamaForCausalLM, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(tiny.llama_config(**SIZES, attn_implementation="eager", **more))


def answers(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Put the rejected answers after the chosen ones, as TRL's collators do."""
    ids = torch.tensor([row[name] for name in ("chosen", "rejected") for row in rows])
    mask = {"completion_mask": torch.ones_like(ids)} if rows[0]["has_mask"] else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **mask}


def pairs(kind: Any, folder: Any, **settings: Any) -> Any:
    """Return a trainer of pairs; that of preferences has a copy of its model as reference."""
    has_mask = kind is Preferences
    model = llama() if has_mask else llama(transformers.LlamaForSequenceClassification, num_labels=1)
    ids = [row["input_ids"] for row in tiny.rows(2 * EXAMPLES, length=LENGTH)]
    rows = [{"chosen": one, "rejected": one[::-1], "has_mask": has_mask} for one in ids]
    given = {"per_device_train_batch_size": EXAMPLES, "max_steps": 2, "remove_unused_columns": False, **settings}
    trainer = kind(model, tiny.arguments(folder, **given), train_dataset=rows, eval_dataset=rows, data_collator=answers)
    trainer._metrics = {"train": {"least": [], "margin": []}}
    if has_mask:
        trainer.ref_model = llama()
    return trainer


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", [Reward, Preferences])
def test_a_run_takes_what_was_simulated(kind: Any, steps: int, tmp_path: Any) -> None:
    trainer = pairs(kind, tmp_path, gradient_accumulation_steps=steps, optim="sgd")
    loaded, loss = load_model(trainer.model).model, trainer_loss(trainer)
    assert loss is not None
    step = StepSettings(precision="fp32", optim="sgd", gradient_accumulation_steps=steps, prepare=(loss,))
    batch = loss.batch(example_batch(loaded, batch_size=2 * EXAMPLES, seq_len=LENGTH))
    trace = record_step(loaded, batch, step, semantics=HostSemantics())
    found = replayed_peak(trace, step, optimizer_memory(parameter_facts(loaded), step))
    trainer.create_optimizer()
    with allocator_peak(trainer.model, *([trainer.ref_model] if kind is Preferences else [])) as peak:
        trainer.train()
    assert found == pytest.approx(peak[0], rel=0.002)


def test_an_estimate_counts_pairs_and_the_reference_and_leaves_the_trainer(tmp_path: Any) -> None:
    trainer = pairs(Preferences, tmp_path, eval_strategy="epoch", per_device_eval_batch_size=4)
    before = [dict(vars(one)) for one in (trainer, trainer.model, trainer.ref_model)]
    found = estimate_of(trainer, BatchShape(2 * EXAMPLES, LENGTH, None, None), gpu="T4")
    assert (found.batch_size, found.seq_len, found.settings.eval_batch_size) == (EXAMPLES, LENGTH, 4)
    assert "loss of DPOTrainer, whose examples are pairs" in str(found).replace("\n", " ")
    assert found.parameters == sum(weight.numel() for weight in trainer.model.parameters())
    plain = estimate(llama(), batch_size=2 * EXAMPLES, seq_len=LENGTH, gpu="T4")
    assert found.components["weights"] == 2 * plain.components["weights"]
    assert found.flops == pytest.approx(4 / 3 * plain.flops, rel=0.01)  # the reference has a forward pass alone
    assert before == [dict(vars(one)) for one in (trainer, trainer.model, trainer.ref_model)]
    assert trainer._metrics == {"train": {"least": [], "margin": []}}


NO_FORM = (
    "not estimable: trainer=<{}> {}, which is not simulated; expected SFTTrainer, DPOTrainer, RewardTrainer without "
    "FSDP. Measure a few steps: {}(..., callbacks=[MemoryReportCallback()])"
)
GENERATES = "trains on completions that it generates or pairs anew"
SHARDED = "gathers its head, and shards a reference, by itself under FSDP"


@pytest.mark.parametrize(
    ("name", "module", "is_sharded", "reason"),
    [
        ("KTOTrainer", "trl.trainer.kto_trainer", False, GENERATES),
        ("GRPOTrainer", "trl.trainer.grpo_trainer", False, GENERATES),
        ("RLOOTrainer", "trl.trainer.rloo_trainer", False, GENERATES),
        ("DistillationTrainer", "trl.trainer.distillation_trainer", False, GENERATES),
        ("NashMDTrainer", "trl.experimental.nash_md.nash_md_trainer", False, GENERATES),
        ("SFTTrainer", "trl.trainer.sft_trainer", True, SHARDED),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(name: str, module: str, is_sharded: bool, reason: str) -> None:
    kind = type(name, (SimpleNamespace,), {"__module__": module})
    for one in (kind, type("Own", (kind,), {})):  # a subclass of the user's, too
        with pytest.raises(NotEstimableError) as error:
            trainer_loss(one(is_fsdp_enabled=is_sharded))
        assert str(error.value) == NO_FORM.format(name, reason, name)
    assert trainer_loss(type("GRPOTrainer", (SimpleNamespace,), {"__module__": "mine"})()) is None


def test_a_forward_that_holds_the_models_own_is_copied_with_the_copys() -> None:
    model, calls = tiny.llama(), []
    forward, lm_head = model.forward, model.lm_head

    @functools.wraps(type(model).forward)
    def patched(self: Any, *args: Any, tripled: bool = False, **kwargs: Any) -> Any:
        calls.append(self.device.type)
        assert lm_head.weight.device == self.device
        return forward(*args, **kwargs)

    model.forward = MethodType(patched, model)
    found = estimate(model, batch_size=2, seq_len=8, gpu="T4")
    plain = estimate(tiny.llama(), batch_size=2, seq_len=8, gpu="T4")
    assert (found.components, found.flops, found.notes) == (plain.components, plain.flops, plain.notes)
    assert calls == ["meta"]
    assert (model.forward.__self__, model.forward.__func__) == (model, patched)
    assert model(torch.tensor([[5, 6]])).logits.device.type == "cpu"
