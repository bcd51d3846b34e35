"""``attach``: the gradient scale against stock's, what it refuses, and all that it must leave as it was."""

from __future__ import annotations

import copy
import inspect
import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import heads
import numpy as np
import peft
import pytest
import torch
import transformers
from datasets import Dataset
from heads import HEADS, gradient_norms, make_trainer
from slow_cases import slow_except
from tables import refuses, whole
from torch import nn
from torch.utils.data import IterableDataset
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, default_data_collator

import hf_memopt as m
import tiny
from hf_memopt import attach
from two_ranks import run_pair

# DeBERTa-v2 of transformers 5.8 and 5.17 calls torch.jit.script when it is imported, which torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SPLITS = [(8, 1), (4, 2), (2, 4)]  # per device x accumulation: 8 examples per optimizer step
BERT_CHANGE = m.types.Change(
    "model_accepts_loss_kwargs", True, False, whole("the loss of BertForSequenceClassification")
)


def bert_trainer(tmp_path: Any, trainer_class: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    pieces = {"model": tiny.bert(), "train_dataset": tiny.rows(), "data_collator": default_data_collator}
    of_trainer = {key: settings.pop(key) for key in list(settings) if key in inspect.signature(Trainer).parameters}
    sizes = {} if "per_device_train_batch_size" in settings else {"gradient_accumulation_steps": 2}
    arguments = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"} | sizes | settings
    return trainer_class(args=tiny.arguments(tmp_path, **arguments), **(pieces | of_trainer))


@pytest.mark.parametrize(
    ("name", "smoothing"),
    slow_except(
        [(name, 0.0) for name in [*HEADS][::4]],
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
        changed = "compute_loss_func" if head.loss else "model_accepts_loss_kwargs"
        if split != SPLITS[0] or trainer.memopt_changes:  # of one step, a loss that is not known is not watched
            assert trainer.model_accepts_loss_kwargs is (changed == "compute_loss_func" or not is_wrong)
            assert [change.name for change in trainer.memopt_changes] == [changed] * is_wrong
        if whole is None:
            whole, reference = norms, trainer.model
            assert norms[0] == pytest.approx(stock[0], rel=1e-5)
        assert norms == pytest.approx(whole, rel=1e-5)  # float32 sums in another order
        assert tiny.largest_difference(trainer.model, reference) < 1e-6
    print(f"\n{name:16} smoothing {smoothing}: stock {factors}, attached {norms[0] / whole[0]:.6f} at 2x4")


@pytest.mark.slow
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
    with caplog.at_level(logging.INFO, logger="hf_memopt.training.binding.losses.gradient_scale"):
        trainer = attach(bert_trainer(tmp_path, gradient_accumulation_steps=2))
    assert trainer.memopt_changes == (BERT_CHANGE,)
    assert caplog.messages == [f"attach changed {BERT_CHANGE}"]
    assert caplog.records[0].levelname == "WARNING"  # it is shown: the losses that are logged differ from stock's


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


@pytest.mark.parametrize("way", ["divided", "times its share", "of the window", "not divided", "a mean of four"])
def test_a_loss_that_divides_by_the_steps_itself_is_left_alone(way, tmp_path):
    class Divided(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, steps = model(**inputs).loss, self.args.gradient_accumulation_steps
            if way == "divided":
                return loss / steps
            if way == "of the window":
                return loss.div(self.current_gradient_accumulation_steps)
            if way == "a mean of four":
                return mean(loss)
            return loss * (1 / steps) if way == "times its share" else loss

    def mean(loss):
        return (loss + loss + loss + loss) / 4

    settings = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_steps": 2}
    trainer = attach(bert_trainer(tmp_path, Divided, **settings))
    trainer.train()
    assert trainer.memopt_changes == ((BERT_CHANGE,) if way in ("not divided", "a mean of four") else ())
    whole = attach(bert_trainer(tmp_path, per_device_train_batch_size=8, max_steps=2))
    whole.train()
    assert tiny.largest_difference(trainer.model, whole.model) < 1e-6


def counted_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    if num_items_in_batch is None:
        return heads.mean_loss(outputs, labels)
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def divided_loss(steps: int) -> Any:
    return lambda outputs, labels, num_items_in_batch=None: heads.mean_loss(outputs, labels) / steps


def halves(weight: float, temperature: float) -> Any:
    """Return a mean whose weight and temperature, from outside, are as many as the steps."""

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        mean = nn.functional.cross_entropy(outputs.logits / temperature * temperature, labels)
        return weight * mean / weight + 0.0

    return loss


def mean_of_four(*args: Any, **kwargs: Any) -> Any:
    loss = heads.mean_loss(*args, **kwargs)
    return (loss + loss + loss + loss) / 4


@pytest.mark.parametrize(
    ("function", "is_repaired"),
    [
        (counted_loss, False),
        (divided_loss(4), False),
        (heads.mean_loss, True),
        (mean_of_four, True),
        (halves(weight=4, temperature=4), True),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
def test_a_loss_function_is_divided_by_the_steps_if_it_does_nothing_of_the_kind(
    function, is_repaired, is_compiled, tmp_path
):
    settings = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_steps": 2}
    given = torch.compile(function, backend="eager") if is_compiled else function
    trainer = attach(bert_trainer(tmp_path, compute_loss_func=given, eval_dataset=tiny.rows(), **settings))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.compute_loss_func is given
    assert [change.name for change in trainer.memopt_changes] == ["compute_loss_func"] * is_repaired
    whole = bert_trainer(tmp_path, compute_loss_func=heads.mean_loss, per_device_train_batch_size=8, max_steps=2)
    whole.train()
    assert tiny.largest_difference(trainer.model, whole.model) < 1e-6
    trainer.memopt_handle.remove()
    assert "compute_loss" not in vars(trainer)
    trainer.model = tiny.bert()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-6)


def routed(coefficient: float = 0.5, **settings: Any) -> nn.Module:
    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    settings = {"output_router_logits": True, "router_aux_loss_coef": coefficient, **settings}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **settings))


def adapted(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))


OTHERS = {"of no weight": {"coefficient": 0.0}, "off": {"output_router_logits": False}, "of one step": {}}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_routers_loss_that_accumulation_multiplies_is_told_with_what_to_set(tmp_path):
    def losses(model: Any, steps: int, coefficient: float | None = None) -> list[float]:
        settings = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8 // steps, "max_steps": 2}
        rows = heads.causal_examples(16)
        trainer = attach(bert_trainer(tmp_path, model=model, train_dataset=rows, logging_steps=1, **settings))
        if coefficient is not None:
            getattr(model, "get_base_model", lambda: model)().router_aux_loss_coef = coefficient
        trainer.train()
        return [one["loss"] for one in trainer.state.log_history if "loss" in one]

    for change in (lambda model: model, adapted):
        torch.manual_seed(0)
        model = change(routed())
        with pytest.warns(UserWarning, match="router") as caught:
            losses(copy.deepcopy(model), 4)
        text = whole("router_aux_loss_coef=0.5", owner="trainer.model" + ".get_base_model()" * (change is adapted))
        assert [str(one.message) for one in caught if issubclass(one.category, UserWarning)] == [text]
        assert losses(copy.deepcopy(model), 4, 0.125) == pytest.approx(losses(model, 1), abs=0.02)  # a mean of means
    for name, settings in OTHERS.items():
        losses(routed(**settings), 1 if name == "of one step" else 4)


class OwnStep(Trainer):
    """A loss that does not take the count."""

    def compute_loss(self, model, inputs, return_outputs=False):
        raise AssertionError("called before training")


def takes_no_count() -> nn.Module:
    model = tiny.bert()
    model.accepts_loss_kwargs = False
    return model


LEFT_ALONE: dict[str, dict[str, Any]] = {
    "a loss without the count": {"trainer_class": OwnStep},
    "compute_loss_func": {"compute_loss_func": lambda *_, **__: pytest.fail("called before training")},
    "a model without loss kwargs": {"model": takes_no_count},
    "a user who says who divides": {"scaled": False},
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_where_stock_or_the_user_divides_nothing_is_repaired(name, tmp_path):
    settings = dict(LEFT_ALONE[name])
    is_scaled = settings.pop("scaled", None)
    if "model" in settings:
        settings["model"] = settings["model"]()
    trainer = bert_trainer(tmp_path, **settings)
    if is_scaled is not None:
        if "loss_is_scaled_for_ga" not in inspect.getsource(Trainer):
            pytest.skip("of transformers 5.23")
        trainer.loss_is_scaled_for_ga = is_scaled
    before = trainer.model_accepts_loss_kwargs
    attach(trainer)
    assert (trainer.memopt_changes, trainer.model_accepts_loss_kwargs) == ((), before)
    assert trainer.compute_loss_func is settings.get("compute_loss_func")


class Stream(IterableDataset):
    """Examples one after the other; counts how many were read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self):
        for row in tiny.rows():
            self.read += 1
            yield row


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_loses_no_example_and_is_repaired_from_the_first_step_on(accumulation, tmp_path):
    settings = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8 // accumulation}
    norms, streams = [], [Stream(), Stream(), tiny.rows()]
    for rows, is_attached in zip(streams, (True, False, True), strict=True):
        norm = heads.GradientNorm()
        trainer = bert_trainer(tmp_path, train_dataset=rows, callbacks=[norm], max_steps=2, **settings)
        (attach(attach(trainer)) if is_attached else trainer).train()
        assert getattr(trainer, "memopt_changes", ()) == (BERT_CHANGE,) * is_attached
        norms.append(norm.norms)
    assert streams[0].read == streams[1].read
    assert norms[0] == pytest.approx(norms[2], rel=1e-5)


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
    "view": lambda: m.bucketed(Dataset.from_list(WEIGHTED_ROWS), batch_size=4),
    "view of a list": lambda: m.bucketed(WEIGHTED_ROWS, batch_size=4),
    "whole batches": lambda: m.bucketed(Dataset.from_list(WEIGHTED_ROWS), max_tokens=64),
}


@pytest.mark.parametrize("name", WEIGHTED_DATA)
def test_a_column_that_a_subclass_adds_reaches_its_loss(name, tmp_path):
    """Of views, which leave unread what stock removes; without ``attach`` the collator gets all of it."""
    losses, names = [], ("input_ids", "attention_mask", "labels", "weight")
    size = 1 if name == "whole batches" else 4
    collate = m.BucketedCollator(tiny.tokenizer())

    def collate_used(rows: Any) -> Any:
        return collate([{key: row[key] for key in names} for row in (rows[0] if size == 1 else rows)])

    for collator in (collate, collate_used):
        settings = {"per_device_train_batch_size": size, "max_steps": 2, "seed": 0}
        data = {"train_dataset": WEIGHTED_DATA[name](), "data_collator": collator}
        trainer = bert_trainer(tmp_path, Weighted, logging_steps=1, logging_strategy="steps", **settings, **data)
        (attach(trainer) if collator is collate else trainer).train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert min(losses[0]) > 2  # unweighted it would be about ln(3)


def test_a_view_reads_the_columns_that_stock_leaves_to_the_collator(tmp_path):
    """By private names, seen in 5.8.1 to 5.23.0."""
    read, settings = ["input_ids", "attention_mask", "labels"], {"data_collator": m.BucketedCollator(tiny.tokenizer())}

    def columns(kind: type[Trainer], **given: Any) -> list[str]:
        view = m.bucketed(Dataset.from_list(WEIGHTED_ROWS), batch_size=4)
        trainer = bert_trainer(tmp_path, kind, train_dataset=view, **settings, **given)
        attach(trainer)
        assert trainer._signature_columns is None  # the model may be another one when training begins
        return list(trainer.train_dataset[0])

    assert columns(Trainer) == read
    assert sorted(columns(Weighted)) == sorted([*read, "weight"])
    assert sorted(columns(Trainer, remove_unused_columns=False)) == sorted(WEIGHTED_ROWS[0])
    stock = bert_trainer(tmp_path)
    stock.get_train_dataloader()
    taken = inspect.signature(stock.model.forward).parameters
    assert set(stock._signature_columns) == {*taken, "labels", "label", "label_ids"}


# peft 0.21 asks transformers 5.23 by the name that 5.17 still used
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_models_are_repaired(tmp_path):
    model = peft.get_peft_model(tiny.bert(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    (change,) = attach(bert_trainer(tmp_path, model=model)).memopt_changes
    assert str(change) == str(BERT_CHANGE).replace("BertFor", "PeftModelFor")


class Unreadable(list):
    def __getitem__(self, index):
        raise AssertionError("attach read a row")


def unreadable(rows: Any) -> Any:
    raise AssertionError("attach called the collator")


@pytest.mark.parametrize("name", HEADS)
def test_attach_reads_no_row_calls_no_collator_or_model_and_draws_no_number(name, tmp_path):
    model = HEADS[name].build()
    model.register_forward_pre_hook(unreadable)
    list(model.modules())[-1].eval()  # modules in mixed modes
    trainer = bert_trainer(tmp_path, model=model, train_dataset=Unreadable([1, 2, 3]), data_collator=unreadable)

    def state() -> list[Any]:
        modes = [(module.training, sorted(vars(module))) for module in model.modules()]
        weights = [(weight.grad, weight.requires_grad, weight._version) for weight in model.parameters()]
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), modes, weights]

    before = state()
    attach(trainer)
    assert state() == before


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


class Undo(RemovableHandle):
    """A handle of a user's own."""

    def __init__(self, undo: Callable[[], object]) -> None:
        super().__init__(OrderedDict())
        self.remove = undo  # type: ignore[method-assign]


class Bound(TrainerCallback):
    def __init__(self) -> None:
        self.bound: list[tuple[Trainer, bool]] = []

    def bind(self, trainer: Trainer) -> RemovableHandle:
        self.bound.append((trainer, trainer.model_accepts_loss_kwargs))
        return Undo(self.bound.clear)


def test_callbacks_are_added_once_and_bound_after_the_repair(tmp_path):
    given, late = Bound(), Bound()
    trainer = bert_trainer(tmp_path, callbacks=[given])
    assert attach(trainer, late, given) is trainer
    assert attach(trainer, late) is trainer
    callbacks = trainer.callback_handler.callbacks
    assert [callbacks.count(given), callbacks.count(late)] == [1, 1]
    assert given.bound == late.bound == [(trainer, False), (trainer, False)]
    assert trainer.memopt_changes == (BERT_CHANGE,)


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
        whole("callbacks=<list> is"): [trainer, [Bound()]],
    }
    for message, arguments in cases.items():
        refuses(TypeError, message, attach, *arguments)
    assert not hasattr(trainer, "memopt_changes")


def half_trained(folder: Any, **settings: Any) -> Trainer:
    trainer = bert_trainer(folder, model=tiny.bert().half(), **settings)
    trainer.args.fp16 = True  # stock accepts it on a GPU only
    return trainer


def of_two_cards(folder: Any) -> Trainer:
    trainer = bert_trainer(folder)
    trainer.args._n_gpu = 2  # what stock counts without a launcher
    return trainer


@pytest.mark.parametrize(
    ("make", "message"),
    [(of_two_cards, whole("n_gpu=2 GPUs are visible")), (half_trained, whole("fp16=True cannot train"))],
    ids=["two cards", "float16"],
)
def test_what_cannot_be_trained_is_refused_and_nothing_changed(make, message, tmp_path):
    trainer, callback = make(tmp_path), Bound()
    before = dict(vars(trainer))
    refuses((RuntimeError, ValueError), message, attach, trainer, callback)
    assert vars(trainer) == before
    assert callback not in trainer.callback_handler.callbacks


def test_a_view_that_does_not_fit_the_arguments_is_refused(tmp_path):
    class View(list):
        def bind_trainer(self, trainer):
            raise ValueError(f"train_sampling_strategy={trainer.args.train_sampling_strategy!r} is not mine")

    trainer = bert_trainer(tmp_path, train_dataset=View(tiny.rows()))
    refuses(ValueError, "train_sampling_strategy='sequential' is not mine", attach, trainer, Bound())
    assert not any(isinstance(callback, Bound) for callback in trainer.callback_handler.callbacks)
    attach(bert_trainer(tmp_path, eval_dataset=View(tiny.rows())))  # evaluation is always in order


def test_attach_is_undone_by_its_handle(tmp_path):
    head = HEADS["t5"]
    rows = Dataset.from_list(head.examples(8))
    trainer = bert_trainer(
        tmp_path,
        model=head.build(),
        train_dataset=m.bucketed(rows, batch_size=4),
        eval_dataset=m.sorted_by_length(rows),
        data_collator=m.BucketedCollator(tiny.tokenizer()),
        train_sampling_strategy="random",
        seed=7,
    )
    parts = (trainer, trainer.args, trainer.train_dataset, trainer.train_dataset.buckets, trainer.data_collator)
    before, callbacks = [dict(vars(part)) for part in parts], list(trainer.callback_handler.callbacks)
    attach(attach(trainer, m.MicrobatchCallback()), m.OverflowCallback(), Bound())
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


def test_an_attach_that_fails_leaves_the_trainer_as_it_was(tmp_path):
    class Failing(Bound):
        def bind(self, trainer: Trainer) -> RemovableHandle:
            raise ValueError("no")

    trainer, bound = bert_trainer(tmp_path), Bound()
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    with pytest.raises(ValueError, match=r"^no$"):
        attach(trainer, bound, Failing())
    assert (vars(trainer), trainer.callback_handler.callbacks, bound.bound) == (before, callbacks, [])


def test_undoing_one_trainer_leaves_what_another_shares(tmp_path):
    view, model = m.bucketed(Dataset.from_list(tiny.rows()), batch_size=4), tiny.bert()
    settings = {"seed": 7, "train_dataset": view, "data_collator": m.BucketedCollator(tiny.tokenizer())}
    for first, second in ((0, 1), (1, 0)):
        both = [attach(bert_trainer(tmp_path / str(i), model=model, **settings)) for i in range(2)]
        both[first].memopt_handle.remove()
        assert (view.buckets.seed, view._as_columns) == (7, True)
        both[second].memopt_handle.remove()
        assert (view.buckets.seed, view._as_columns) == (0, False)
