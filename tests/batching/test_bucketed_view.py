"""Bucketed views: what they show, what attach fits to the Trainer and what it refuses, and the guards."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import warnings
from typing import Any

import datasets
import heads
import noted_batches
import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from tables import refuses, table, whole
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, TensorDataset
from transformers import Trainer

import tiny
from hf_memopt import BucketedCollator, attach, bucketed, packed, sorted_by_length, token_lengths
from hf_memopt.types import Change

COUNT = 36
LENGTHS = [(7 * i) % 23 + 1 for i in range(COUNT)]


def examples(count: int = COUNT) -> list[dict[str, Any]]:
    """Return examples of different lengths; the first token, 5 + index, tells which one it is."""
    return [{"input_ids": [5 + i] + [50] * (LENGTHS[i % COUNT] - 1), "labels": i % 3} for i in range(count)]


VIEWS = {"examples": {"batch_size": 4, "n_buckets": 3}, "batches": {"max_tokens": 96, "n_buckets": 3}}


def make_trainer(
    output_dir: Any, view: Any, *, sequential: bool = True, **settings: Any
) -> tuple[Trainer, list[list[int]]]:
    defaults = {"num_train_epochs": 2, **({"train_sampling_strategy": "sequential"} if sequential else {})}
    return noted_batches.make_trainer(output_dir, view, view.buckets.batch_size, **{**defaults, **settings})


@pytest.mark.parametrize(("given", "expected"), [({"seed": 7}, 7), ({"seed": 7, "data_seed": 5}, 5)])
@pytest.mark.parametrize("kind", VIEWS)
def test_attach_takes_the_seed_from_the_arguments(kind, given, expected, tmp_path):
    view = bucketed(examples(), **VIEWS[kind])
    before = list(view[0])
    trainer = attach(attach(make_trainer(tmp_path, view, **given)[0]))
    change = Change("seed of the bucketed view", 0, expected, f"that of TrainingArguments({[*given][-1]}=...)")
    assert [found for found in trainer.memopt_changes if "seed" in found.name] == [change]
    assert list(view) == list(bucketed(examples(), seed=expected, **VIEWS[kind]))
    assert list(view[0]) != before or kind == "examples"


@pytest.mark.parametrize("kind", VIEWS)
def test_each_trainer_of_a_view_reads_the_order_of_its_own_seed(kind, tmp_path):
    alone, expected = make_trainer(tmp_path, bucketed(examples(), **VIEWS[kind]), seed=7)
    attach(alone).train()
    view = bucketed(examples(), **VIEWS[kind])
    (first, seen), (second, _) = (make_trainer(tmp_path, view, seed=seed) for seed in (6, 8))
    attach(first)
    first.args.seed = 7
    attach(first)
    attach(second)
    first.train()
    assert seen == expected


@pytest.mark.parametrize("kind", VIEWS)
def test_attach_reads_only_what_the_model_takes(kind, tmp_path):
    rows = [{**row, "text": f"row {i}", "length": 3} for i, row in enumerate(examples())]
    view = bucketed(Dataset.from_list(rows), **VIEWS[kind])
    trainer, seen = make_trainer(tmp_path, view, num_train_epochs=1)
    attach(trainer).train()
    assert sorted(i for batch in seen for i in batch) == list(range(COUNT))
    item = view[0] if kind == "examples" else view[0][0]
    assert item.keys() == {"input_ids", "labels"}
    kept = bucketed(Dataset.from_list(rows).remove_columns("text"), **VIEWS[kind])
    attach(make_trainer(tmp_path, kept, remove_unused_columns=False)[0])
    assert (kept[0] if kind == "examples" else kept[0][0]).keys() == {"input_ids", "labels", "length"}


def test_boundaries_are_what_batches_are_padded_to(tmp_path):
    for limit in ({"max_tokens": 96}, {"batch_size": 4}):
        view = bucketed(Dataset.from_list(examples()), boundaries=[12, 24], **limit)
        trainer, _ = make_trainer(tmp_path, view, num_train_epochs=1)
        shapes = noted_batches.note_shapes(trainer.model)
        attach(trainer).train()
        assert {width for _, width in shapes} == {12, 24}
        assert len({*shapes}) <= 3
    view = bucketed(examples(), boundaries=[12, 24], batch_size=4)
    plain = DataLoader(view, batch_size=4, collate_fn=BucketedCollator(tiny.tokenizer()))
    assert {batch["input_ids"].shape[1] for batch in plain} == {12, 24}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("source", [list, Dataset.from_list], ids=["list", "arrow"])
def test_the_items_are_those_of_the_plan(kind, source):
    rows = examples()
    view = bucketed(source(rows), **VIEWS[kind])
    view.set_epoch(1)
    plan = view.buckets.plan(1)
    assert view.indices_of(range(len(view))) == plan.flat().tolist()
    assert view.indices_of([len(view)]) == view.indices_of([0])
    if kind == "examples":
        assert len(view) == COUNT
        assert [view[i] for i in range(COUNT)] == [rows[i] for i in plan.flat()]
        assert view.__getitems__([3, 4]) == [view[3], view[4]]
    else:
        assert len(view) == view.buckets.n_batches
        assert [view[i] for i in range(len(view))] == [[rows[i] for i in plan.batch(k)] for k in range(len(view))]
        assert view.__getitems__([2]) == [view[2]]
        assert view[-1] == view[len(view) - 1]


@pytest.mark.parametrize("kind", VIEWS)
def test_set_epoch_is_idempotent_and_pickles_and_copies_follow_it(kind):
    view = bucketed(examples(), **VIEWS[kind])
    first = view[0], view[1], view[2]
    for _ in range(2):
        view.set_epoch(1)
        assert view.epoch == 1
        assert (view[0], view[1], view[2]) != first
    for twin in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert twin.epoch == 1
        assert twin[2] == view[2]
        assert twin._shared.tensor.is_shared()
        twin.set_epoch(0)
        assert (twin[0], twin[1], twin[2]) == first
        assert view.epoch == 1


def test_the_stock_random_sampler_is_refused(tmp_path):
    trainer, seen = make_trainer(tmp_path, bucketed(examples(), batch_size=4), train_sampling_strategy="random")
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    shown = str(error.value).removeprefix("positions=").split(" ...")[0]
    assert str(error.value) == whole("positions={positions}", positions=shown)
    assert (len(json.loads(shown)), seen) == (4, [])
    with pytest.raises(RuntimeError, match=r"^positions=\["):
        list(DataLoader(trainer.train_dataset, batch_size=4, shuffle=True, collate_fn=list))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 9, 16, 17, 23])
def test_the_wrap_around_of_even_batches_is_allowed(world_size, count):
    view = bucketed(examples(count), batch_size=4, world_size=world_size)
    seen: list[int] = []
    for rank in range(world_size):
        sampler = BatchSampler(SequentialSampler(view), batch_size=4, drop_last=False)
        for positions in BatchSamplerShard(sampler, num_processes=world_size, process_index=rank, even_batches=True):
            seen += [row["input_ids"][0] - 5 for row in view.__getitems__(positions)]
    assert set(seen) == set(range(count))


@pytest.mark.parametrize(("kind", "most"), [("examples", 4), ("batches", 1)])
def test_more_positions_than_a_batch_are_refused(kind, most):
    larger = f", or where it varies bucketed(dataset, batch_size={most + 1}) or recipe.replace(bucketing=False)"
    values = {"count": most + 1, "most": most, "larger": larger if most > 1 else ""}
    message, view = whole("positions=<{count}", **values), bucketed(examples(), **VIEWS[kind])
    refuses(RuntimeError, message, view.__getitems__, list(range(most + 1)))


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("count", [COUNT + 1, COUNT - 2])
def test_a_dataset_that_grew_or_shrank_is_refused(kind, count):
    rows = examples()
    view = bucketed(rows, **VIEWS[kind])
    rows[:] = examples(count)
    for read in (lambda: view[0], lambda: view.__getitems__([0])):
        refuses(RuntimeError, whole("dataset=<{count} examples>", count=count, had=COUNT), read)


@pytest.mark.parametrize("strategy", [{}, {"train_sampling_strategy": "group_by_length"}], ids=["default", "by length"])
@pytest.mark.parametrize("kind", VIEWS)
def test_an_attached_trainer_reads_the_view_in_its_own_order(kind, strategy, tmp_path):
    view = bucketed(examples(), **VIEWS[kind])
    trainer, seen = make_trainer(tmp_path, view, sequential=False, num_train_epochs=1, **strategy)
    old = strategy.get("train_sampling_strategy", "random")
    assert trainer.args.train_sampling_strategy == old
    attach(attach(trainer))
    reason = "the bucketed view brings its own shuffled order, grouped by length"
    order = Change("train_sampling_strategy", old, "sequential", reason)
    reason = "an item of a max_tokens= view is a whole batch"
    sample = Change("samples in the Trainer's log", "examples", "batches", reason)
    changes = [change for change in trainer.memopt_changes if change.name in (order.name, sample.name)]
    assert sorted(changes, key=str) == ([order] if kind == "examples" else [sample, order])
    assert trainer.train().metrics["epoch"] == 1.0
    plan = bucketed(examples(), **VIEWS[kind], seed=trainer.args.seed).plan
    assert seen == [plan.batch(i).tolist() for i in range(len(plan))]
    trainer.memopt_handle.remove()
    assert trainer.args.train_sampling_strategy == old


REFUSED = {name: tuple(row) for name, *row in table("batching/tables/refused_view")}


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED.values(), ids=REFUSED)
def test_attach_refuses_arguments_that_spoil_the_view(kind, settings, message, tmp_path):
    others = {"of two": {"batch_size": 4, "world_size": 2}, "seeded": {"batch_size": 4, "seed": 3}}
    trainer, _ = make_trainer(tmp_path, bucketed(examples(), **{**VIEWS, **others}[kind]), **settings)
    refuses(ValueError, message, attach, trainer)


def test_attach_refuses_a_view_as_evaluation_data_and_takes_its_dataset(tmp_path):
    for trained in (bucketed(examples(), batch_size=4), examples()):
        args = tiny.arguments(tmp_path, train_sampling_strategy="sequential", per_device_train_batch_size=2)
        trainer = Trainer(tiny.bert(), args, train_dataset=trained, data_collator=BucketedCollator(tiny.tokenizer()))
        view = bucketed(examples(), batch_size=8)
        for trainer.eval_dataset in ({"one": view}, view):
            refuses(ValueError, NOT_FOR_EVALUATION, attach, trainer)
        trainer.eval_dataset = trainer.eval_dataset.dataset
        assert attach(trainer) is trainer


def test_max_tokens_below_a_multiple_are_for_boundaries_of_ones_own():
    assert bucketed([{"input_ids": [1] * length} for length in (2, 3, 5)], max_tokens=6, boundaries=[3, 6])


def test_a_collator_that_pads_wider_than_max_tokens_counts_is_refused(tmp_path):
    trainer, _ = make_trainer(tmp_path, bucketed(examples(), max_tokens=256), per_device_train_batch_size=1)
    trainer.data_collator = BucketedCollator(tiny.tokenizer(), pad_to_multiple_of=64)
    message = r"pad_to_multiple_of=64 of the collator .* counts in multiples of 8; expected"
    with pytest.raises(ValueError, match=message):
        attach(trainer)


NOT_FOR_EVALUATION = whole("dataset=<BucketedView>")


def test_an_attached_trainer_refuses_to_evaluate_a_view(tmp_path):
    trainer = Trainer(tiny.bert(), tiny.arguments(tmp_path), data_collator=BucketedCollator(tiny.tokenizer()))
    attach(trainer)
    view = bucketed(examples(), batch_size=4)
    for evaluate in (trainer.predict, trainer.evaluate, lambda view: trainer.evaluate({"one": view})):
        refuses(ValueError, NOT_FOR_EVALUATION, evaluate, view)
    refuses(ValueError, NOT_FOR_EVALUATION, trainer.predict, bucketed(examples(), max_tokens=96))


@pytest.mark.parametrize(
    "view", [lambda rows: bucketed(rows, batch_size=4), lambda rows: packed(rows, 64), sorted_by_length]
)
def test_a_stream_is_refused_and_rows_are_taken_of_it_as_the_message_says(view):
    class Listed(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(examples())

    for stream in (Dataset.from_list(examples()).to_iterable_dataset(), Listed(), iter(examples())):
        message = whole("dataset=<{kind}> is a stream", kind=type(stream).__name__)
        refuses(TypeError, message, view, stream)
        names = {"datasets": datasets, "itertools": itertools, "stream": stream}
        found = view(eval(message.rpartition(": ")[2], names))
        assert found.dataset.to_list() == examples()


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_describes_its_dataset_and_has_none_of_its_methods(kind):
    dataset = Dataset.from_list(examples())
    view = bucketed(dataset, **VIEWS[kind])
    assert (view.features, view.info, view.split) == (dataset.features, dataset.info, None)
    # rows would be of another order
    refuses(AttributeError, whole("{name!r} object has", name=type(view).__name__), getattr, view, "map")
    assert not hasattr(view, "remove_columns")
    with pytest.raises(AttributeError, match=r"Call: sorted_by_length\(dataset\.remove_columns\(\.\.\.\), \.\.\.\)"):
        sorted_by_length(dataset).remove_columns([])
    with pytest.raises(AttributeError, match=r"no attribute 'mapp'$"):
        _ = view.mapp
    assert view.column_names == ["input_ids", "labels"]
    assert not hasattr(bucketed(examples(), **VIEWS[kind]), "column_names")


def test_lengths_of_another_dataset_are_refused_and_fitting_ones_replace_the_column():
    message = whole("lengths=<array of shape (2,)> does not belong to a dataset of {count}", count=COUNT)
    refuses(ValueError, message, bucketed, examples(), batch_size=4, lengths=[1, 2])
    assert len(bucketed(TensorDataset(torch.zeros(3, 2)), batch_size=2, lengths=[4, 5, 6])) == 3


def test_a_dataset_hears_of_each_epoch(tmp_path):
    class Epochs(Subset):
        def set_epoch(self, epoch):
            heard.add(epoch)

    heard: set[int] = set()
    trainer, _ = make_trainer(tmp_path, bucketed(Epochs(examples(), range(8)), batch_size=4), num_train_epochs=3)
    attach(trainer).train()
    assert heard == {0, 1, 2}


@pytest.mark.parametrize(("drops", "told"), [(True, 1), (False, 0)])
def test_what_is_dropped_last_is_always_of_the_shortest(tmp_path, caplog, drops, told):
    rows = [{"input_ids": [5] * length, "labels": 0} for length in (9, 9, 9, 9, 2)]
    trainer, _ = make_trainer(tmp_path, bucketed(rows, batch_size=4), dataloader_drop_last=drops)
    with caplog.at_level("WARNING", logger="hf_memopt"):
        attach(trainer)
    assert caplog.text.count("leaves what fills no batch out of every epoch") == told


@pytest.mark.parametrize(("size", "is_told"), [(4, False), (2, True)])
def test_a_run_that_goes_on_with_batches_of_another_size_is_told_what_it_repeats(size, is_told, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 1}
    first, before = make_trainer(tmp_path, bucketed(examples(), batch_size=4), **saving)
    attach(first).train()
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **saving}
    trainer, after = make_trainer(tmp_path, bucketed(examples(), batch_size=size), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach(trainer).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    told = (
        "per_device_train_batch_size=2 differs from the checkpoint's 4, and so does the order of the bucketed view: "
        "the rest of this epoch repeats examples and lacks others; expected the view of the first run. "
        "Pass bucketed(..., batch_size=4)"
    )
    assert [str(one.message) for one in caught if "bucketed" in str(one.message)] == [told] * is_told
    assert (len({i for batch in (*before[:4], *after) for i in batch}) < COUNT) == is_told


@pytest.mark.parametrize(("accumulation", "step"), [(1, 4), (2, 2), (2, 5)])
@pytest.mark.parametrize(("max_tokens", "is_told"), [(96, False), (64, True)])
def test_a_run_that_goes_on_with_another_budget_is_told_what_it_repeats(
    max_tokens, is_told, accumulation, step, tmp_path
):
    settings = {"save_strategy": "steps", "save_steps": step, "gradient_accumulation_steps": accumulation}
    first, _ = make_trainer(tmp_path, bucketed(examples(), max_tokens=96), **settings)
    attach(first).train()
    trainer, _ = make_trainer(tmp_path, bucketed(examples(), max_tokens=max_tokens), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach(trainer).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    told = [str(one.message) for one in caught if "bucketed(...)" in str(one.message)]
    assert [one.startswith(f"step {step} of the checkpoint ends at epoch ") for one in told] == [True] * is_told


@pytest.mark.parametrize("source", [list, Dataset.from_list])
def test_labels_beyond_the_budget_are_told(source, tmp_path, caplog):
    data = source([{"input_ids": [5] * 4, "labels": [5] * length} for length in (4, 16, 16, 4)])
    longer = np.maximum(token_lengths(data), token_lengths(data, "labels"))
    told = []
    for lengths in (None, longer):
        view = bucketed(data, max_tokens=32, lengths=lengths, pad_to_multiple_of=1)
        collator = BucketedCollator(tiny.tokenizer(), pad_to_multiple_of=1)
        args = tiny.arguments(tmp_path, per_device_train_batch_size=1)
        trainer = Trainer(heads.HEADS["t5"].build(), args, train_dataset=view, data_collator=collator)
        with caplog.at_level("WARNING", logger="hf_memopt"):
            attach(trainer)
        sizes = [batch["labels"].numel() for batch in trainer.get_train_dataloader()]
        told.append((max(sizes), f"the decoder has {max(sizes)} padded tokens in a batch" in caplog.text))
        caplog.clear()
    assert told == [(64, True), (32, False)]


@pytest.mark.parametrize(("kind", "item"), [("examples", "an example"), ("batches", "a batch")])
def test_positions_behind_the_end_are_refused(kind, item):
    view = bucketed(examples(), **VIEWS[kind])
    assert view[np.int64(1)] == view[torch.tensor(1)] == view[1]
    message = f"position={len(view)} is not {item} of this view; expected 0 to {len(view) - 1}"
    refuses(IndexError, message, view.__getitem__, len(view))
