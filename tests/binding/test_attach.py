"""``attach``: the gradient scale against stock's, what it refuses, and all that it must leave as it was."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import random
import weakref
from typing import Any

import heads
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from heads import HEADS, OwnLoss, gradient_norms, make_trainer
from slow_cases import slow_except
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

import hf_memopt
import tiny
from hf_memopt import FreezeCallback, MicrobatchCallback, OverflowCallback, PrecisionCallback
from hf_memopt.batching.collation import BucketedCollator
from hf_memopt.batching.exact_losses import exact_loss
from hf_memopt.batching.views import bucketed, sorted_by_length
from hf_memopt.binding import TrainingView, attach, refuse_data_parallel
from hf_memopt.binding.callback_binding import unbound_error
from hf_memopt.binding.model import used_columns
from hf_memopt.binding.protocols import AttachedCallback, AttachedPart, EvaluationView
from hf_memopt.binding.undo import UndoHandle
from hf_memopt.changes import Change
from two_ranks import run_pair

# DeBERTa-v2 of transformers 5.8 and 5.17 calls torch.jit.script when it is imported, which torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SPLITS = [(8, 1), (4, 2), (2, 4)]  # per device x accumulation: 8 examples per optimizer step
BERT_CHANGE = Change(
    "model_accepts_loss_kwargs",
    True,
    False,
    "the loss of BertForSequenceClassification ignores num_items_in_batch, so stock would multiply its gradients by "
    "accumulation steps x processes",
)


def unclear(finding: str, model: str = "BertForSequenceClassification") -> str:
    return (
        f"attach could not find out whether the loss of {model} is normalised by num_items_in_batch ({finding}); its "
        "gradients may be multiplied by the accumulation steps. If the loss is a mean over the batch, set: "
        "trainer.model_accepts_loss_kwargs = False"
    )


def bert_trainer(tmp_path: Any, trainer_class: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    pieces = {"model": tiny.bert(), "train_dataset": tiny.rows(), "data_collator": default_data_collator}
    of_trainer = {key: settings.pop(key) for key in list(settings) if key in inspect.signature(Trainer).parameters}
    arguments = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"} | settings
    return trainer_class(args=tiny.arguments(tmp_path, **arguments), **(pieces | of_trainer))


class Stream(IterableDataset):
    """Examples one after the other; counts how many were read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.read = rows, 0

    def __iter__(self):
        for row in self.rows:
            self.read += 1
            yield row


class SeenBatches(TrainerCallback):
    """Note the first id of every row that a model is given while it trains."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[list[list[int]]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training:
            self.seen.append(kwargs["input_ids"].tolist())


# ---- gradient scale


@pytest.mark.parametrize(
    ("name", "smoothing"),
    slow_except(
        [(name, 0.0) for name in HEADS],
        # stock asks for the configuration of a model whose labels it smooths, and one of its own has none
        [(name, smoothing) for name in HEADS for smoothing in (0.0, 0.1) if not (smoothing and "own" in name)],
    ),
)
def test_the_split_of_a_batch_changes_neither_gradient_nor_weights(name, smoothing, tmp_path):
    head = HEADS[name]

    def make(per_device, accumulation):
        return make_trainer(head, tmp_path, per_device, accumulation, label_smoothing_factor=smoothing)

    stock = [gradient_norms(make(*split))[0] for split in SPLITS]
    factors = [norm / stock[0] for norm in stock]
    wrong = pytest.approx([1, 2, 4], rel=1e-4)
    right = pytest.approx([1, 1, 1], rel=1e-4)
    if not smoothing:  # with it, stock's own smoother counts the items from 5.17 on, and in 5.8 for no head
        assert factors == (wrong if head.is_wrong_in_stock else right)
    is_wrong = factors == wrong
    assert is_wrong or factors == right

    whole, reference = None, None
    for split in SPLITS:
        trainer = attach(make(*split))
        norms = gradient_norms(trainer)
        assert trainer.model_accepts_loss_kwargs is not is_wrong
        assert [change.name for change in trainer.memopt_changes] == ["model_accepts_loss_kwargs"] * is_wrong
        if whole is None:
            whole, reference = norms, trainer.model
            assert norms[0] == pytest.approx(stock[0], rel=1e-5)
        assert norms == pytest.approx(whole, rel=1e-5)  # float32 sums in another order
        assert tiny.largest_difference(trainer.model, reference) < 1e-6
    print(f"\n{name:16} smoothing {smoothing}: stock {factors}, attached {norms[0] / whole[0]:.6f} at 2x4")


def test_two_processes_give_the_gradient_of_one(tmp_path):
    results, _ = run_pair(tmp_path, heads.__file__, str(tmp_path))
    assert set(results) == set(HEADS)
    for name, result in results.items():
        trainer = attach(make_trainer(HEADS[name], tmp_path, 8, 1))
        norms = gradient_norms(trainer)
        factor = 2 if HEADS[name].is_wrong_in_stock else 1
        assert result["stock"][0] == pytest.approx(factor * norms[0], rel=1e-4), name
        assert result["attached"] == pytest.approx(norms, rel=1e-5), name
        weights = float(sum(p.detach().double().sum() for p in trainer.model.parameters()))
        assert result["weights"] == pytest.approx(weights, abs=1e-4), name  # a sum over all weights


def test_the_change_tells_what_was_found(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hf_memopt.binding.losses.gradient_scale"):
        trainer = attach(bert_trainer(tmp_path))
    assert trainer.memopt_changes == (BERT_CHANGE,)
    assert caplog.messages == [f"attach changed {BERT_CHANGE}"]


def test_stock_reads_the_switch_of_the_instance_at_every_step(tmp_path):
    """What the repair rests on, in every supported version."""
    assert "model_accepts_loss_kwargs" not in vars(Trainer)
    head = HEADS["bert"]
    trainer = make_trainer(head, tmp_path, 2, 4)

    class SwitchAfterFirstStep(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            trainer.model_accepts_loss_kwargs = False

    trainer.add_callback(SwitchAfterFirstStep())
    assert vars(trainer)["model_accepts_loss_kwargs"] is True
    trainer.args.learning_rate = 0.0  # both steps from the same weights
    first, second = gradient_norms(trainer)
    whole = make_trainer(head, tmp_path, 8, 1)
    whole.args.learning_rate = 0.0
    one, two = gradient_norms(whole)
    assert (first / one, second / two) == pytest.approx((4, 1), rel=1e-4)


def test_a_loss_that_ignores_the_count_in_kwargs_is_repaired_too(tmp_path):
    class MeanLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            return nn.functional.cross_entropy(model(**inputs).logits, labels)

    trainer = attach(bert_trainer(tmp_path, MeanLoss))
    assert trainer.memopt_changes == ()
    trainer.train()
    assert trainer.memopt_changes == (BERT_CHANGE,)
    trainer.memopt_handle.remove()
    assert trainer.model_accepts_loss_kwargs


def test_a_loss_without_the_count_is_the_users_own(tmp_path):
    calls = []

    class OwnStep(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            calls.append(1)

    trainer = attach(bert_trainer(tmp_path, OwnStep))
    assert (trainer.memopt_changes, trainer.model_accepts_loss_kwargs, calls) == ((), True, [])


def test_a_users_compute_loss_func_is_left_alone(tmp_path):
    def summed(outputs, labels, num_items_in_batch=None):
        raise AssertionError("called before training")

    trainer = attach(bert_trainer(tmp_path, compute_loss_func=summed))
    assert trainer.compute_loss_func is summed
    assert (trainer.memopt_changes, trainer.model_accepts_loss_kwargs) == ((), True)


def test_a_model_that_takes_no_loss_kwargs_is_left_alone(tmp_path):
    model = tiny.bert()
    model.accepts_loss_kwargs = False
    trainer = attach(bert_trainer(tmp_path, model=model))
    assert (trainer.memopt_changes, trainer.model_accepts_loss_kwargs) == ((), False)


def test_nothing_to_train_on_is_no_error(tmp_path):
    trainer = attach(bert_trainer(tmp_path, train_dataset=None))
    assert (trainer.memopt_changes, trainer.model_accepts_loss_kwargs) == ((), True)


class Weighted(Trainer):
    """A weighted loss, as stock documents it: the subclass names a column that the model does not take."""

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        self._signature_columns += ["weight"]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = inputs.pop("weight")
        losses = nn.functional.cross_entropy(model(**inputs).logits, inputs["labels"], reduction="none")
        return (losses * weights).mean()


WEIGHTED_ROWS = [{**row, "weight": 1.0 + i, "text": "no tensor"} for i, row in enumerate(tiny.rows())]
WEIGHTED_DATA = {
    "list": lambda: WEIGHTED_ROWS,
    "view": lambda: bucketed(Dataset.from_list(WEIGHTED_ROWS), batch_size=4),
    "view of a list": lambda: bucketed(WEIGHTED_ROWS, batch_size=4),
    "whole batches": lambda: bucketed(Dataset.from_list(WEIGHTED_ROWS), max_tokens=64),
    "stream": lambda: bucketed(Dataset.from_list(WEIGHTED_ROWS).to_iterable_dataset(), batch_size=4),
}


@pytest.mark.parametrize("name", WEIGHTED_DATA)
def test_a_column_that_a_subclass_adds_reaches_its_loss(name, tmp_path):
    """Of views and streams, which leave unread what stock removes."""
    losses = []
    for attached in (True, False):
        trainer = bert_trainer(
            tmp_path,
            Weighted,
            train_dataset=WEIGHTED_DATA[name](),
            data_collator=BucketedCollator(tiny.tokenizer()),
            per_device_train_batch_size=1 if name == "whole batches" else 4,
            max_steps=2,
            logging_steps=1,
            logging_strategy="steps",
            seed=0,
        )
        if not attached:  # stock, without a view that leaves columns unread
            view = trainer.train_dataset
            if name == "whole batches":
                trainer.data_collator = lambda rows: BucketedCollator(tiny.tokenizer())(
                    [{key: row[key] for key in ("input_ids", "attention_mask", "labels", "weight")} for row in rows[0]]
                )
            else:
                trainer.data_collator = DataCollatorWithPadding(tiny.tokenizer())
            assert trainer.train_dataset is view
        else:
            attach(trainer)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert min(losses[0]) > 2  # unweighted it would be about ln(3)


def test_stock_asks_for_its_columns_by_the_names_that_are_relied_on(tmp_path):
    """Private, seen in 5.8.1 to 5.23.0; without them the signature of the model counts."""
    trainer = bert_trainer(tmp_path)
    assert trainer._signature_columns is None
    asked = used_columns(trainer)
    assert trainer._signature_columns is None  # the model may be another one when training begins
    trainer.get_train_dataloader()
    assert set(trainer._signature_columns) == asked
    assert asked == {*inspect.signature(trainer.model.forward).parameters, "labels", "label", "label_ids"}
    own = bert_trainer(tmp_path, Weighted)
    own.get_train_dataloader()
    cached = list(own._signature_columns)
    assert used_columns(own) == asked | {"weight"}
    assert own._signature_columns == cached
    own._set_signature_columns_if_needed = None
    assert used_columns(own) == asked
    assert used_columns(bert_trainer(tmp_path, remove_unused_columns=False)) is None


def test_the_columns_are_those_of_the_model_that_is_trained(tmp_path):
    class TakesWeights(type(tiny.bert())):
        def forward(self, input_ids=None, attention_mask=None, labels=None, weight=None, **kwargs):
            seen.append(weight is not None)
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    seen = []
    data = {"train_dataset": bucketed(Dataset.from_list(WEIGHTED_ROWS), batch_size=4)}
    trainer = attach(bert_trainer(tmp_path, data_collator=BucketedCollator(tiny.tokenizer()), max_steps=1, **data))
    assert set(trainer.train_dataset[0]) == {"input_ids", "attention_mask", "labels"}
    trainer.model = trainer.model_wrapped = TakesWeights(trainer.model.config)
    trainer.train()
    assert seen == [True]


# peft 0.21 asks transformers 5.23 by the name that 5.17 still used
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_models_are_repaired(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny.bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    (change,) = attach(bert_trainer(tmp_path, model=adapted)).memopt_changes
    assert str(change) == str(BERT_CHANGE).replace("BertFor", "PeftModelFor")


def test_frozen_models_are_repaired(tmp_path):
    model = tiny.bert()
    model.bert.requires_grad_(False)
    trainer = attach(bert_trainer(tmp_path, model=model))
    assert trainer.memopt_changes == (BERT_CHANGE,)
    assert [p.requires_grad for p in model.bert.parameters()] == [False] * len(list(model.bert.parameters()))


# ---- nothing is read before training


class Unreadable(list):
    def __getitem__(self, index):
        raise AssertionError("attach read a row")


def unreadable(rows: Any) -> Any:
    raise AssertionError("attach called the collator")


@pytest.mark.parametrize("name", HEADS)
def test_attach_reads_no_row_calls_no_collator_and_draws_no_number(name, tmp_path):
    generator = torch.Generator().manual_seed(0)
    model = HEADS[name].build()
    model.register_forward_pre_hook(unreadable)
    trainer = bert_trainer(tmp_path, model=model, train_dataset=Unreadable([1, 2, 3]), data_collator=unreadable)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), generator.get_state()
    attach(trainer)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), generator.get_state()
    assert before[:2] == after[:2]
    assert all(map(torch.equal, before[2:], after[2:]))


@pytest.mark.parametrize("way", ["stock", "removed"])
def test_a_collator_with_a_generator_of_its_own_masks_as_with_stock(way, tmp_path):
    """Its generator goes on from one batch to the next, so a batch more would change all that follow."""
    models = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = BertForMaskedLM(tiny.bert_config())
        collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm_probability=0.3, seed=42)
        rows = [{"input_ids": row["input_ids"]} for row in tiny.rows()]
        trainer = bert_trainer(tmp_path, model=model, train_dataset=rows, data_collator=collator, num_train_epochs=2)
        if attached:
            attach(trainer)
            assert [change.name for change in trainer.memopt_changes] == ["model_accepts_loss_kwargs"]
            if way == "removed":
                trainer.memopt_handle.remove()
        trainer.train()
        models.append(model)
    assert tiny.largest_difference(*models) == 0


# ---- a loss of one's own: watched in the first step


class PassedOn(OwnLoss):
    """Hands the count on in every way that is no use of it."""

    def forward(self, input_ids, labels, **kwargs):
        count = kwargs["num_items_in_batch"]
        copies = [count.to(torch.float64), count.clone().reshape(1), count.detach()]
        assert all(copy.device == count.device and copy.dim() < 2 and f"{copy}" for copy in copies)
        return super().forward(input_ids, labels, **kwargs)


class ReadOnce(OwnLoss):
    """Reads the number of a copy of the count."""

    def forward(self, input_ids, labels, **kwargs):
        count = kwargs["num_items_in_batch"].to(torch.float64)
        found = super().forward(input_ids, labels, **kwargs)
        return {**found, "loss": found["loss"] * len(labels) / count.item()}


@pytest.mark.parametrize(("kind", "ignores"), [(PassedOn, True), (ReadOnce, False)])
def test_a_count_is_used_where_an_operation_takes_its_number(kind, ignores, tmp_path):
    trainer = attach(bert_trainer(tmp_path, model=kind(counts=False), max_steps=1))
    assert (trainer.memopt_changes, trainer.model_accepts_loss_kwargs) == ((), True)
    trainer.train()
    assert trainer.model_accepts_loss_kwargs is not ignores
    assert len(trainer.memopt_changes) == ignores
    assert "compute_loss" not in vars(trainer)


def test_evaluation_before_training_is_not_watched(tmp_path):
    trainer = attach(bert_trainer(tmp_path, model=OwnLoss(counts=False), eval_dataset=tiny.rows(), max_steps=1))
    trainer.evaluate()
    assert trainer.memopt_changes == ()
    trainer.train()
    assert [change.name for change in trainer.memopt_changes] == ["model_accepts_loss_kwargs"]


def test_a_loss_that_fails_is_watched_when_it_is_computed_again(tmp_path):
    class FailsOnce(Trainer):
        fails = True

        def compute_loss(self, *args, **kwargs):
            if FailsOnce.fails:
                FailsOnce.fails = False  # not of the trainer, which is put back as it was
                raise torch.OutOfMemoryError("once")
            return super().compute_loss(*args, **kwargs)

    model = OwnLoss(counts=False)
    trainer = attach(bert_trainer(tmp_path, FailsOnce, model=model, max_steps=1), MicrobatchCallback())
    trainer.train()
    assert "model_accepts_loss_kwargs" in [change.name for change in trainer.memopt_changes]


def test_what_was_compiled_cannot_be_watched_and_that_is_said(tmp_path):
    model = OwnLoss(counts=False)
    model.compile(backend="eager")
    trainer = attach(bert_trainer(tmp_path, model=model, max_steps=1))
    with pytest.warns(UserWarning, match="attach could not find out") as caught:
        trainer.train()
    assert [str(warning.message) for warning in caught] == [unclear("torch.compile hides what it computes", "OwnLoss")]
    assert (trainer.memopt_changes, trainer.model_accepts_loss_kwargs) == ((), True)


def test_a_count_that_is_no_tensor_cannot_be_watched(tmp_path):
    class IntegerCount(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, int(num_items_in_batch))

    trainer = attach(bert_trainer(tmp_path, IntegerCount, model=OwnLoss(counts=False), max_steps=1))
    with pytest.warns(UserWarning, match="attach could not find out") as caught:
        trainer.train()
    assert [str(warning.message) for warning in caught] == [unclear("it is 4, not a tensor", "OwnLoss")]


def test_what_torch_compile_leaves_on_a_module_is_as_relied_on():
    """Private, seen in torch 2.13."""
    module = nn.Linear(1, 1)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    assert hasattr(torch.compile(module, backend="eager"), "_orig_mod")


def test_stock_multiplies_its_loss_in_place_and_nothing_else():
    """By the number of processes; so what ``compute_loss`` itself multiplies in place can be left out."""
    lines = [line for line in inspect.getsource(Trainer.compute_loss).splitlines() if "*=" in line or "mul_" in line]
    assert len(lines) == 1
    assert lines[0].strip().startswith("loss *= ")


@pytest.mark.skipif("loss_is_scaled_for_ga" not in inspect.getsource(Trainer), reason="of transformers 5.23")
def test_a_user_who_says_who_divides_is_left_alone(tmp_path):
    trainer = bert_trainer(tmp_path)
    trainer.loss_is_scaled_for_ga = False
    attach(trainer)
    assert (trainer.memopt_changes, trainer.model_accepts_loss_kwargs) == ((), True)


# ---- streams


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_loses_no_example_and_is_repaired_from_the_first_step_on(accumulation, tmp_path):
    def run(attached, rows):
        settings = {"max_steps": 2, "gradient_accumulation_steps": accumulation}
        settings["per_device_train_batch_size"] = 8 // accumulation
        norm = heads.GradientNorm()
        trainer = bert_trainer(tmp_path, train_dataset=rows, callbacks=[norm], **settings)
        seen = SeenBatches(trainer.model)
        if attached:
            attach(attach(trainer))
        trainer.train()
        assert getattr(trainer, "memopt_changes", ()) == (BERT_CHANGE,) * attached
        return seen.seen, norm.norms

    stream, untouched = Stream(tiny.rows()), Stream(tiny.rows())
    seen, norms = run(True, stream)
    expected, _ = run(False, untouched)
    assert seen == expected
    assert stream.read == untouched.read
    _, whole = run(True, tiny.rows())
    assert norms == pytest.approx(whole, rel=1e-5)


class SeveralSets(Trainer):
    """Train on data sets by name, as sentence-transformers does."""

    def get_train_dataloader(self):
        rows = [row for dataset in self.train_dataset.values() for row in dataset]
        return self.accelerator.prepare(DataLoader(rows, batch_size=4, collate_fn=self.data_collator))


@pytest.mark.parametrize("kind", [dict, DatasetDict])
def test_several_data_sets_are_no_reason_to_warn(kind, tmp_path):
    sets = kind({name: Dataset.from_list(tiny.rows(8, seed=seed)) for seed, name in enumerate("ab")})
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2}
    trainer = attach(SeveralSets(OwnLoss(counts=False), tiny.arguments(tmp_path, **settings), train_dataset=sets))
    assert trainer.memopt_changes == ()
    trainer.train()
    assert [change.name for change in trainer.memopt_changes] == ["model_accepts_loss_kwargs"]


def test_a_training_step_of_the_instance_comes_back(tmp_path):
    trainer = bert_trainer(tmp_path, train_dataset=Stream(tiny.rows()), max_steps=2)
    stock, steps = trainer.training_step, []

    def own_step(*args, **kwargs):
        steps.append(1)
        return stock(*args, **kwargs)

    trainer.training_step = own_step
    attach(trainer).train()
    assert trainer.training_step is own_step
    assert len(steps) == 2
    assert trainer.memopt_changes == (BERT_CHANGE,)


def test_a_wrapper_put_around_what_watches_stays(tmp_path):
    trainer = attach(bert_trainer(tmp_path, model=OwnLoss(counts=False), max_steps=3))
    watching, losses = trainer.compute_loss, []

    def outer_loss(*args, **kwargs):
        losses.append(1)
        return watching(*args, **kwargs)

    trainer.compute_loss = outer_loss
    trainer.train()
    assert trainer.compute_loss is outer_loss
    assert len(losses) == 3
    assert len(trainer.memopt_changes) == 1


def test_after_the_first_step_the_trainer_is_free_of_what_watched(tmp_path):
    trainer = attach(bert_trainer(tmp_path, model=OwnLoss(counts=False), max_steps=1))
    watching = weakref.ref(trainer.compute_loss)
    assert watching() is not None
    trainer.train()
    gc.collect()
    assert watching() is None


# ---- what stays as it was


class Normed(nn.Module):
    """A mean loss that ignores the count, behind BatchNorm and dropout, with modules in mixed modes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.linear = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x, labels=None, **kwargs):
        self.calls += 1
        random.random(), np.random.rand(), torch.rand(1)  # a model may draw numbers in evaluation too
        return {"loss": nn.functional.cross_entropy(self.linear(self.dropout(self.norm(x))), labels)}


@pytest.mark.filterwarnings("ignore:.*label_names.*")
def test_modes_weights_gradients_buffers_and_random_numbers_stay(tmp_path):
    def draw_and_collate(examples):
        random.random(), np.random.rand(), torch.rand(1)
        return default_data_collator(examples)

    model = Normed()
    rows = [{"x": torch.randn(4), "labels": i % 3} for i in range(8)]
    trainer = bert_trainer(tmp_path, model=model, train_dataset=rows, data_collator=draw_and_collate)
    model.train()
    model.norm.eval()
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()

    attach(trainer)

    assert model.calls == 0
    assert random.getstate() == before[0]
    for old, new in zip(before[1], np.random.get_state(), strict=True):
        assert np.array_equal(old, new)
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.linear.weight.grad, torch.ones_like(model.linear.weight))
    assert model.linear.bias.grad is None


def test_training_after_attach_equals_stock_where_nothing_is_repaired(tmp_path):
    """Dropout, shuffling and all: nothing that attach read or drew may show."""
    models = []
    for attached in (False, True):
        model = tiny.llama(attention_dropout=0.1)
        rows = heads.causal_examples(16)
        trainer = bert_trainer(tmp_path, model=model, train_dataset=rows, train_sampling_strategy="random", seed=3)
        if attached:
            attach(trainer)
        trainer.train()
        models.append(model)
    assert tiny.largest_difference(*models) == 0


def test_neither_the_class_nor_another_trainer_is_changed(tmp_path):
    attributes = dict(vars(Trainer))
    one, other = bert_trainer(tmp_path), bert_trainer(tmp_path)
    of_model = set(vars(one.model))
    attach(one)
    assert dict(vars(Trainer)) == attributes
    assert set(vars(one.model)) == of_model
    assert (one.model_accepts_loss_kwargs, other.model_accepts_loss_kwargs) == (False, True)
    assert not hasattr(other, "memopt_changes")
    assert type(one) is Trainer


# ---- callbacks


class Bound(TrainerCallback):
    def __init__(self) -> None:
        self.bound: list[tuple[Trainer, bool]] = []

    def bind(self, trainer: Trainer) -> UndoHandle:
        self.bound.append((trainer, trainer.model_accepts_loss_kwargs))
        return UndoHandle(self.bound.clear)


def test_callbacks_are_added_once_and_bound_after_the_repair(tmp_path):
    given, late = Bound(), Bound()
    trainer = bert_trainer(tmp_path, callbacks=[given])
    assert attach(trainer, late, given) is trainer
    assert attach(trainer, late) is trainer
    callbacks = trainer.callback_handler.callbacks
    assert [callbacks.count(given), callbacks.count(late)] == [1, 1]
    assert given.bound == late.bound == [(trainer, False), (trainer, False)]
    assert trainer.memopt_changes == (BERT_CHANGE,)


def test_what_the_collator_adapts_is_recorded_once(tmp_path):
    collator = BucketedCollator(tiny.tokenizer())
    head = HEADS["t5"]
    trainer = bert_trainer(tmp_path, model=head.build(), train_dataset=head.examples(8), data_collator=collator)
    attach(attach(trainer))
    assert [str(change) for change in trainer.memopt_changes] == [
        "integer lists in labels: 'told apart by length' -> 'decoder labels' (T5ForConditionalGeneration is an "
        "encoder-decoder, whose labels are padded on the right)",
        "model_accepts_loss_kwargs: True -> False (the loss of T5ForConditionalGeneration ignores num_items_in_batch, "
        "so stock would multiply its gradients by accumulation steps x processes)",
    ]


class WithTrainer:
    """A trainer of another library, with a stock one inside."""

    def __init__(self, inside: Trainer) -> None:
        self.model, self.st_trainer = inside.model, inside


def test_what_is_not_a_trainer_or_a_callback_is_refused(tmp_path):
    trainer = bert_trainer(tmp_path)
    not_a_trainer = "is not a transformers.Trainer; expected the Trainer that trains."
    cases = {
        f"trainer=<WithTrainer> {not_a_trainer} Pass the one inside it: attach(trainer.st_trainer)": [
            WithTrainer(trainer)
        ],
        f"trainer=<BertForSequenceClassification> {not_a_trainer} Call attach(Trainer(model, ...))": [trainer.model],
        f"trainer=<class Trainer> {not_a_trainer} Call attach(Trainer(model, ...))": [Trainer],
        f"trainer=<NoneType> {not_a_trainer} Call attach(Trainer(model, ...))": [None],
        "callbacks=<class Bound> is not a TrainerCallback; expected instances. Call attach(trainer, Bound(...))": [
            trainer,
            Bound,
        ],
        "callbacks=<list> is not a TrainerCallback; expected instances. "
        "Call attach(trainer, MemoryReportCallback(...))": [trainer, [Bound()]],
    }
    for message, arguments in cases.items():
        with pytest.raises(TypeError) as error:
            attach(*arguments)
        assert str(error.value) == message
    assert not hasattr(trainer, "memopt_changes")


def test_changes_can_be_pickled(tmp_path):
    changes = attach(bert_trainer(tmp_path)).memopt_changes
    assert pickle.loads(pickle.dumps(changes)) == changes


def test_the_error_of_an_unbound_callback():
    assert str(unbound_error(Bound())) == (
        "Bound was passed in callbacks= but never bound to its trainer; expected a bound callback. "
        "Call attach(trainer) before trainer.train(), with: from hf_memopt import attach"
    )


# ---- what is refused, before anything is changed


def test_several_cards_in_one_process_are_refused(tmp_path):
    trainer, callback = bert_trainer(tmp_path), Bound()
    trainer.args._n_gpu = 2  # what stock counts without a launcher
    with pytest.raises(RuntimeError) as error:
        attach(trainer, callback)
    assert str(error.value) == (
        "n_gpu=2 GPUs are visible to this one process, so the Trainer would use torch.nn.DataParallel; expected one "
        "process per GPU. Launch: torchrun --nproc_per_node=2 your_script.py (or show it one GPU only: "
        "CUDA_VISIBLE_DEVICES=0 python your_script.py)"
    )
    assert callback not in trainer.callback_handler.callbacks
    assert (trainer.model_accepts_loss_kwargs, hasattr(trainer, "memopt_changes")) == (True, False)
    for n_gpu in (0, 1):
        refuse_data_parallel(n_gpu)


def test_fp16_training_of_float16_weights_is_refused(tmp_path):
    trainer = bert_trainer(tmp_path, model=tiny.bert().half())
    trainer.args.fp16 = True  # stock accepts it on a GPU only
    with pytest.raises(ValueError) as error:
        attach(trainer)
    assert str(error.value) == (
        "fp16=True cannot train bert.embeddings.word_embeddings.weight, whose weights are float16 already (no gradient "
        "could be unscaled); expected float32 weights. Load with: from_pretrained(..., dtype=torch.float32)"
    )
    assert not hasattr(trainer, "memopt_changes")


def test_fp16_is_accepted_where_what_trains_is_float32(tmp_path):
    model = tiny.bert()
    model.bert.half().requires_grad_(False)
    trainer = bert_trainer(tmp_path, model=model, train_dataset=None)
    trainer.args.fp16 = True
    assert attach(trainer).memopt_changes == ()


def test_a_view_that_does_not_fit_the_arguments_is_refused(tmp_path):
    class View(list):
        def bind_trainer(self, trainer):
            raise ValueError(f"train_sampling_strategy={trainer.args.train_sampling_strategy!r} is not mine")

    trainer = bert_trainer(tmp_path, train_dataset=View(tiny.rows()))
    with pytest.raises(ValueError) as error:
        attach(trainer, Bound())
    assert str(error.value) == "train_sampling_strategy='sequential' is not mine"
    assert not any(isinstance(callback, Bound) for callback in trainer.callback_handler.callbacks)
    attach(bert_trainer(tmp_path, eval_dataset=View(tiny.rows())))  # evaluation is always in order


def test_an_exact_loss_is_bound_and_its_changes_are_recorded(tmp_path):
    model = tiny.llama()
    trainer = Trainer(
        model,
        tiny.arguments(tmp_path, label_smoothing_factor=0.1),
        train_dataset=[{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 4,
        compute_loss_func=exact_loss(model),
    )
    names = ["exact_loss label_smoothing", "num_items_in_batch"]
    assert [change.name for change in attach(attach(trainer)).memopt_changes] == names
    assert trainer.model_accepts_loss_kwargs  # nothing to repair: the loss counts by itself
    assert trainer.train().global_step > 0


# ---- undone


def test_attach_is_undone_by_its_handle(tmp_path):
    head = HEADS["t5"]
    rows = Dataset.from_list(head.examples(8))
    trainer = bert_trainer(
        tmp_path,
        model=head.build(),
        train_dataset=bucketed(rows, batch_size=4),
        eval_dataset=sorted_by_length(rows),
        data_collator=BucketedCollator(tiny.tokenizer()),
        train_sampling_strategy="random",
        seed=7,
    )
    parts = (trainer, trainer.args, trainer.train_dataset, trainer.train_dataset.buckets, trainer.data_collator)
    before, callbacks = [dict(vars(part)) for part in parts], list(trainer.callback_handler.callbacks)
    attach(attach(trainer, MicrobatchCallback()), OverflowCallback(), Bound())
    assert [change.name for change in trainer.memopt_changes] == [
        "seed of the bucketed view",
        "train_sampling_strategy",
        "integer lists in labels",
        "model_accepts_loss_kwargs",
    ]
    trainer.memopt_handle.remove()
    del trainer.memopt_handle
    assert trainer.callback_handler.callbacks == callbacks
    assert [dict(vars(part)) for part in parts] == before


def test_what_attach_undid_can_be_attached_again(tmp_path):
    trainer, callback = bert_trainer(tmp_path / "one"), MicrobatchCallback()
    attach(trainer, callback).memopt_handle.remove()
    assert trainer.model_accepts_loss_kwargs
    other = attach(bert_trainer(tmp_path / "other"), callback)
    assert attach(trainer).memopt_changes == other.memopt_changes == (BERT_CHANGE,)


def test_an_attach_that_fails_leaves_the_trainer_as_it_was(tmp_path):
    class Failing(Bound):
        def bind(self, trainer: Trainer) -> UndoHandle:
            raise ValueError("no")

    trainer, bound = bert_trainer(tmp_path), Bound()
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    with pytest.raises(ValueError, match=r"^no$"):
        attach(trainer, bound, Failing())
    assert (vars(trainer), trainer.callback_handler.callbacks, bound.bound) == (before, callbacks, [])


def test_a_copy_of_an_attached_trainer_has_nothing_to_undo(tmp_path):
    trainer = attach(bert_trainer(tmp_path), MicrobatchCallback())
    copied = copy.deepcopy(trainer)
    copied.memopt_handle.remove()
    assert trainer.memopt_changes == (BERT_CHANGE,)
    assert not trainer.memopt_handle.is_removed


def test_every_callback_and_part_of_the_package_is_recognised():
    rows = Dataset.from_list(tiny.rows())
    callbacks = [
        getattr(hf_memopt, name) for name in hf_memopt.__all__ if name.endswith("Callback") and not name.startswith("L")
    ]
    assert len(callbacks) == 14
    for kind in callbacks:
        assert issubclass(kind, AttachedCallback), kind
    for part in (
        bucketed(rows, batch_size=4),
        bucketed(rows, max_tokens=64),
        bucketed(rows.to_iterable_dataset(), batch_size=4),
    ):
        assert isinstance(part, TrainingView)
    assert isinstance(sorted_by_length(rows), EvaluationView)
    assert isinstance(BucketedCollator(tiny.tokenizer()), AttachedPart)
    assert isinstance(exact_loss(tiny.bert()), AttachedPart)


# ---- what several trainers share


def test_undoing_one_trainer_leaves_what_another_shares(tmp_path):
    view, model = bucketed(Dataset.from_list(tiny.rows()), batch_size=4), tiny.bert()
    loss, collator = exact_loss(model), BucketedCollator(tiny.tokenizer())
    settings = {"seed": 7, "label_smoothing_factor": 0.1, "train_dataset": view, "data_collator": collator}
    for first, second in ((0, 1), (1, 0)):
        both = [
            attach(bert_trainer(tmp_path / str(i), model=model, compute_loss_func=loss, **settings)) for i in range(2)
        ]
        both[first].memopt_handle.remove()
        assert (view.buckets.seed, loss._smoothing_of_arguments, view._as_columns) == (7, 0.1, True)
        both[second].memopt_handle.remove()
        assert (view.buckets.seed, loss._smoothing_of_arguments, view._as_columns) == (0, 0.0, False)


def test_the_trainer_of_the_view_alone_reads_in_order(tmp_path):
    rows = Dataset.from_list(tiny.rows())
    args = tiny.arguments(tmp_path, train_sampling_strategy="random")
    with_view = attach(Trainer(tiny.bert(), args, train_dataset=bucketed(rows, batch_size=args.train_batch_size)))
    plain = Trainer(tiny.bert(), args, train_dataset=rows)

    def sampler(trainer: Trainer) -> str:
        return type(trainer.get_train_dataloader().batch_sampler.sampler).__name__

    assert [sampler(with_view), sampler(plain)] == ["SequentialSampler", "SeedableRandomSampler"]
    assert with_view.args is args
    assert args.train_sampling_strategy == "random"
    with_view.train_dataset = rows
    assert sampler(with_view) == "SeedableRandomSampler"
    with_view.memopt_handle.remove()


def test_undoing_goes_on_after_an_error(tmp_path):
    class Failing(Bound):
        def bind(self, trainer: Trainer) -> UndoHandle:
            return UndoHandle(lambda: [].remove(1))

    trainer, removed = bert_trainer(tmp_path), MicrobatchCallback()
    before = dict(vars(trainer))
    attach(trainer, removed, Failing())
    trainer.remove_callback(removed)
    with pytest.raises(ValueError, match=r"^list.remove"):
        trainer.memopt_handle.remove()
    del trainer.memopt_handle
    assert vars(trainer) == before


def test_a_callback_of_ones_own_has_to_return_a_handle(tmp_path):
    class Without(TrainerCallback):
        def bind(self, trainer: Trainer) -> None:
            pass

    with pytest.raises(TypeError) as error:
        attach(bert_trainer(tmp_path), Without())
    assert str(error.value) == (
        "bind of <Without> returned None; expected the handle that undoes it (hf_memopt.binding.protocols). "
        "Return UndoHandle(...) or nothing_to_undo()"
    )


@pytest.mark.parametrize("callback", [FreezeCallback("base"), PrecisionCallback()])
def test_a_callback_that_has_moved_on_keeps_its_new_model(callback, tmp_path):
    one, other = (
        bert_trainer(tmp_path / str(i), model=tiny.bert().to(torch.bfloat16), bf16=True, use_cpu=True) for i in range(2)
    )
    attach(one, callback)
    callback.handle.remove()
    attach(other, callback)
    changed = [(weight.dtype, weight.requires_grad) for weight in other.model.parameters()]
    one.memopt_handle.remove()
    assert [(weight.dtype, weight.requires_grad) for weight in other.model.parameters()] == changed
    other.memopt_handle.remove()
    assert {(weight.dtype, weight.requires_grad) for weight in other.model.parameters()} == {(torch.bfloat16, True)}
