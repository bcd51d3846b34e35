"""What every technique has to keep, alone and with the others: weights, losses, resume, arguments, other Trainers."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import GradientState
from slow_cases import slow_except
from table_of_code import PARTS, RUN_IN_ONE_PROCESS, every_refusal
from transformers import Trainer, TrainerCallback

import technique_ranks
import tiny
from hf_memopt import FusedCrossEntropyCallback, attach
from hf_memopt.plain_data import packaged_rows
from hf_memopt.technique_list import LATE_LOSS, TECHNIQUES
from hf_memopt.training.binding import checkpointing_arguments
from technique_table import GROUPS, STEPS, TABLE, fits, make_trainer, model_of, run, tolerance
from two_ranks import run_pair

SETTING_ARGUMENTS = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "norm clipping": {"max_grad_norm": 0.5},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "reentrant checkpointing": checkpointing_arguments(use_reentrant=True),
    "paged optimizer": {"optim": "paged_adamw_8bit"},
    "layer-wise optimizer": {"optim": "lomo"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "torch.compile": {"torch_compile": True},
    "DDP": {"ddp_broadcast_buffers": False, "ddp_find_unused_parameters": False},
}
PART_ARGUMENTS = {"bitsandbytes optimizer": {"optim": "paged_adamw_8bit"}}


def difference(one: Any, other: Any) -> float:
    return tiny.largest_difference(one.trainer.model, other.trainer.model)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], Any]:
    """What a technique trains by itself: one run for all tests that compare with it."""
    return functools.cache(lambda name: run([name], tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_keeps_losses_weights_metrics_and_arguments(name, alone, tmp_path) -> None:
    ours, stock = alone(name), run([name], tmp_path, use=False)
    assert difference(ours, stock) <= TABLE[name].tolerance
    assert ours.losses == pytest.approx(stock.losses, abs=1e-6 if TABLE[name].tolerance else 0.0)
    assert ours.metrics == pytest.approx(stock.metrics, abs=1e-6 if TABLE[name].tolerance else 0.0)
    assert ours.trainer.state.global_step == STEPS
    args, others = ours.trainer.args, stock.trainer.args
    assert {**args.to_dict(), "output_dir": others.output_dir} == others.to_dict()
    assert pickle.loads(pickle.dumps(args)).to_dict() == args.to_dict()
    assert args.to_json_string()


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_resumed_run_equals_the_straight_one(name, tmp_path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    straight = run([name], tmp_path, **saving)
    resumed = run([name], tmp_path, resume=str(tmp_path / "checkpoint-2"), **saving)
    assert difference(resumed, straight) == 0.0
    assert resumed.losses == straight.losses


WITH_CALLBACK = [name for name in TECHNIQUES if TABLE[name].callback is not None]
NEED_ATTACH = ("micro-batching", "non-finite detection", "precision", "evaluation guard", "sharded checkpoints")


@pytest.mark.parametrize("name", WITH_CALLBACK)
def test_a_used_callback_is_copied_unused_and_keeps_nothing_alive(name, tmp_path) -> None:
    trainer = make_trainer([name], tmp_path)
    trainer.train()
    callback, unused = callback_of(trainer, name), TABLE[name].callback()
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert type(copied) is type(callback)
        if name != "memory report":  # which keeps what it has measured
            assert pickle.dumps(copied) == pickle.dumps(unused)
            assert (getattr(copied, "changes", []), getattr(copied, "handle", None)) == ([], None)
    references = weakref.ref(trainer), weakref.ref(trainer.model), weakref.ref(trainer.optimizer.optimizer)
    del trainer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize(
    "name", slow_except(("freezing", "streamed layers", "micro-batching", "precision"), WITH_CALLBACK)
)
def test_a_model_made_for_each_run_is_trained_as_the_one_before(name, alone, tmp_path) -> None:
    trainer = make_trainer([name], tmp_path, model_init=lambda: model_of([name]))
    for _ in range(2):
        trainer.train()
        assert tiny.largest_difference(trainer.model, alone(name).trainer.model) == 0.0


def state_of(trainer: Any) -> dict[str, Any]:
    """Everything of a Trainer, its model and the process that a technique may have changed."""
    model = trainer.model
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "trainer": sorted(set(vars(trainer)) - {"memopt_changes"}),
        "accelerator": sorted(vars(trainer.accelerator)),
        "arguments": trainer.args.to_dict(),
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "parameter hooks": [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()],
        "module hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "checkpointing": [bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules()],
        # stock keeps its list of removed hooks
        "modules": [sorted(set(vars(module)) - {"_require_grads_hooks"}) for module in model.modules()],
        "precision": torch.backends.fp32_precision,
        "autocast": vars(trainer.accelerator.autocast_handler) if trainer.accelerator.autocast_handler else None,
    }


@pytest.mark.parametrize("name", WITH_CALLBACK)
def test_the_handle_undoes_it(name, tmp_path) -> None:
    """Attach with and without the technique, train twice, undo once: nothing of it is left."""
    plain = make_trainer([], tmp_path, model=TABLE[name].model, max_steps=3, **TABLE[name].settings)
    trainer = make_trainer([name], tmp_path, max_steps=3)
    for one in (plain, trainer, plain, trainer):
        one.train()
    if (handle := getattr(callback_of(trainer, name), "handle", None)) is not None:
        handle.remove()
    assert state_of(trainer) == state_of(plain)


class TrainsAnother(TrainerCallback):
    """Runs a whole second training in the middle of the first."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.other.train()


SHARING = ("length buckets", "32-bit embeddings", "micro-batching", "non-finite detection")  # something of a process


@pytest.mark.parametrize("name", slow_except(SHARING, TECHNIQUES))
def test_two_trainers_do_not_disturb_each_other(name, alone, tmp_path) -> None:
    """A second Trainer with the same technique, and one without any, train in the middle of the first."""
    bare = {"model": TABLE[name].model, **TABLE[name].settings}
    expected, plain = alone(name), run([], tmp_path, **bare)
    same, without = make_trainer([name], tmp_path), make_trainer([], tmp_path, **bare)
    first = make_trainer([name], tmp_path)
    first.add_callback(TrainsAnother(same))
    first.add_callback(TrainsAnother(without))
    first.train()
    assert tiny.largest_difference(first.model, expected.trainer.model) == 0.0
    assert tiny.largest_difference(same.model, expected.trainer.model) == 0.0
    assert tiny.largest_difference(without.model, plain.trainer.model) == 0.0


@pytest.mark.parametrize("name", slow_except(("32-bit embeddings", "micro-batching", "precision"), WITH_CALLBACK))
def test_a_callback_serves_one_trainer_at_a_time(name, alone, tmp_path) -> None:
    bare = {"model": TABLE[name].model, **TABLE[name].settings}
    first, second = make_trainer([name], tmp_path / "first"), make_trainer([], tmp_path / "second", **bare)
    callback = callback_of(first, name)
    before = state_of(second)
    with pytest.raises(ValueError) as error:
        attach(second, callback)
    kind = type(callback).__name__
    trainers = [
        f"Trainer of {type(second.model).__name__}, output_dir='{tmp_path / name}'" for name in ("first", "second")
    ]
    assert str(error.value) == (
        f"callbacks=<{kind}> is attached to another trainer already ({trainers[0]}) and cannot serve this one too "
        f"({trainers[1]}); expected a callback for each trainer. Pass a second one: attach(trainer, {kind}(...))"
    )
    assert state_of(second) == before
    assert attach(first, callback) is first
    first.train()
    assert tiny.largest_difference(first.model, alone(name).trainer.model) == 0.0
    if getattr(callback, "handle", None) is not None:  # taken off, or with its trainer gone, it is free
        callback.handle.remove()
    else:
        del first
    assert attach(make_trainer([], tmp_path / "third", **bare), callback)


def callback_of(trainer: Any, name: str) -> Any:
    return next(one for one in trainer.callback_handler.callbacks if getattr(one, "technique", None) == name)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda trainer: pickle.loads(pickle.dumps(trainer))}


OFTEN_COPIED = (*NEED_ATTACH, "length buckets", "16-bit weights", "streamed layers")


@pytest.mark.parametrize("way", slow_except(("pickle",), COPIES))
@pytest.mark.parametrize("name", slow_except(OFTEN_COPIED, TECHNIQUES))
def test_a_copied_trainer_acts_on_itself_alone(name, way, alone, tmp_path) -> None:
    """Its callbacks bind themselves when it begins to train, or it is attached: both train as the original."""
    GradientState._reset_state()  # where an iteration broke off it holds weak references, which do not pickle
    original = make_trainer([name], tmp_path / "original")
    weights, step = copy.deepcopy(original.model), original.state.global_step
    twin, unattached = COPIES[way](original), COPIES[way](original)
    unattached.train()
    assert unattached.state.global_step == STEPS
    expected = alone(name).trainer.model
    if name in WITH_CALLBACK:
        assert tiny.largest_difference(unattached.model, expected) == 0.0
    assert (tiny.largest_difference(original.model, weights), original.state.global_step) == (0.0, step)
    attach(twin).train()
    assert tiny.largest_difference(twin.model, expected) == 0.0
    assert (tiny.largest_difference(original.model, weights), original.state.global_step) == (0.0, step)
    original.train()
    assert tiny.largest_difference(original.model, expected) == 0.0


@pytest.mark.parametrize("setting", slow_except(("nothing",), ["nothing", *RUN_IN_ONE_PROCESS]))
@pytest.mark.parametrize("group", GROUPS)
def test_techniques_keep_the_weights_together(group, setting, tmp_path) -> None:
    names = [name for name in TECHNIQUES if name in GROUPS[group] and fits(name, setting)]
    settings = SETTING_ARGUMENTS.get(setting, {})
    ours, stock = (run(names, tmp_path / str(use), use=use, **settings) for use in (True, False))
    largest = tolerance(names)
    if setting == "bf16":  # one rounding of bfloat16 per micro-batch
        largest *= 2**15
    assert difference(ours, stock) <= largest
    assert ours.trainer.state.global_step == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("cases", [technique_ranks.QUICK, technique_ranks.CASES])
def test_techniques_keep_the_weights_in_two_processes(cases, tmp_path) -> None:
    for found in run_pair(tmp_path, technique_ranks.__file__, str(tmp_path), *cases):
        assert list(found) == list(cases)
        for case, furthest in found.items():
            setting, group = case.split(": ")
            names = technique_ranks.names_under(setting, group)
            assert furthest <= tolerance(names), case


def test_the_groups_hold_every_pair_that_is_not_refused() -> None:
    for one in TECHNIQUES:
        for other in TECHNIQUES:
            if one != other and fits(one, other):
                assert any({one, other} <= group for group in GROUPS.values()), (one, other)


@pytest.mark.parametrize("refusal", every_refusal(), ids=lambda refusal: f"{refusal.one} and {refusal.other}")
def test_attach_refuses_what_cannot_work_together(refusal, tmp_path, monkeypatch) -> None:
    names = [name for name in (refusal.one, refusal.other) if name in TECHNIQUES]
    setting = refusal.other if refusal.other not in TECHNIQUES else None
    arguments = PART_ARGUMENTS if refusal.one in PARTS else SETTING_ARGUMENTS
    trainer = unattached(names, tmp_path, monkeypatch, arguments.get(refusal.one if names == [] else setting, {}))
    if refusal.one == LATE_LOSS:
        trainer.add_callback(FusedCrossEntropyCallback())
        trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.loss
    if setting is not None and setting.startswith("DDP"):
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
    if setting == "Liger kernel":  # which would have to be installed
        trainer.args.use_liger_kernel = True
    if setting == "TRL":
        trainer.__class__ = type("SFTTrainer", (Trainer,), {"__module__": "trl.trainer.sft_trainer"})
    trainer.is_fsdp_enabled = setting in ("FSDP2", "other sharding")
    monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", setting == "FSDP2")
    trainer.is_deepspeed_enabled = setting in ("DeepSpeed", "ZeRO-3")
    if setting == "ZeRO-3":
        plugin = SimpleNamespace(zero_stage=3)
        monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin, raising=False)
    before = state_of(trainer)
    with pytest.raises(ValueError) as error:
        attach(trainer)
    assert str(error.value) == (
        f"{refusal.one} and {refusal.other} are incompatible: {refusal.reason}; expected only one of them. "
        f"{refusal.fix}"
    )
    assert state_of(trainer) == before


def unattached(names: list[str], folder: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr("technique_table.attach", lambda trainer: trainer)
        return make_trainer(names, folder, **settings)


def test_every_name_in_a_refusal_is_known() -> None:
    settings = {row["setting"] for row in packaged_rows("hf_memopt.training.binding.compatibility", "settings.csv")}
    for refusal in every_refusal():
        assert refusal.one in (*TECHNIQUES, *PARTS, LATE_LOSS)
        assert refusal.other in TECHNIQUES or refusal.other in settings
