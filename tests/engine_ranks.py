"""The techniques as one of two processes: python engine_ranks.py FOLDER ENGINE CASE...

Each case writes what the process found, and the weights of the trained model, whole. ``test_engines.py`` reads them,
and trains the same rows in one process.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed_on_cpu
import fsdp_on_cpu
import torch
from fsdp_on_cpu import check_engine, sharding, whole_weights
from transformers import Trainer

import scarcity
import technique_table
import tiny
from hf_memopt import FusedCrossEntropyCallback, MicrobatchCallback, OverflowCallback, ShardedCheckpointCallback, attach
from hf_memopt.technique_list import TECHNIQUES
from hf_memopt.training.binding.compatibility import refusal_of
from hf_memopt.training.binding.model_changes import add_adapters
from hf_memopt.training.binding.undo import override_method

RANK = int(os.environ.get("RANK", "0"))
ENGINES: dict[str, dict[str, Any]] = {
    "DDP": {"ddp_broadcast_buffers": False, "ddp_find_unused_parameters": False},
    "DDP, default flags": {},
    "FSDP2": fsdp_on_cpu.arguments(),
    "DeepSpeed": deepspeed_on_cpu.arguments(2),
    "ZeRO-3": deepspeed_on_cpu.arguments(3),
}
SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}


def engine() -> str:
    """Return the engine that this process is to train with."""
    return sys.argv[2]


def pair(layer: str | None = None) -> dict[str, Any]:
    """Return the arguments of a run in two processes.

    ``layer``: the class that FSDP2 shards by itself. Of a BERT the embeddings are another one by default, and
    accelerate 1.15 shards the word embeddings inside it a second time, which raises.
    """
    chosen = ENGINES[engine()]
    if layer is not None and "fsdp_config" in chosen:
        chosen = {**chosen, "fsdp_config": {**chosen["fsdp_config"], "transformer_layer_cls_to_wrap": [layer]}}
    return {"ddp_backend": "gloo", **chosen}


def allowed(setting: str) -> tuple[str, ...]:
    """Return the techniques that work with an engine and with each other, on the model of most of them."""
    names = [name for name in TECHNIQUES if name in technique_table.GROUPS["with micro-batches"]]
    engines = ("DeepSpeed", setting) if setting == "ZeRO-3" else (setting,)
    names = [name for name in names if all(refusal_of(name, engine) is None for engine in engines)]
    return tuple(name for name in names if technique_table.TABLE[name].model is None)


# ---- Models and trainers, also of the one process they are compared with ---------------------------------------------


def classification(folder: Path, names: tuple[str, ...] = (), **settings: Any) -> Trainer:
    """Return a Trainer on a tiny BERT with the named techniques."""
    return technique_table.make_trainer(names, folder, **settings)


def causal_lm(folder: Path, *callbacks: Any, lora: bool = False, rows: Any = None, **settings: Any) -> Trainer:
    """Return a Trainer on a tiny Llama, with accumulation over rows of mixed lengths."""
    model: Any = tiny.llama()
    if lora:
        torch.manual_seed(1)
        model = add_adapters(model, 4, lora_alpha=32)
    asked = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 3}
    asked |= {"train_sampling_strategy": "sequential", "logging_strategy": "steps", "logging_steps": 1}
    args = tiny.arguments(folder, **{**asked, **settings})
    data = scarcity.causal_rows(48) if rows is None else rows
    trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=scarcity.Pad())
    return attach(trainer, *callbacks)


def spoil(trainer: Any, here: bool) -> None:
    """Make the loss of the second step not finite, and a gradient of the third."""

    def compute_loss(before: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = before(model, inputs, *args, **kwargs)
        step = trainer.state.global_step + 1
        if here and step == 3:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss * math.nan if here and step == 2 else loss

    override_method(trainer, "compute_loss", compute_loss)


# ---- Cases ----------------------------------------------------------------------------------------------------------


def trained(trainer: Any, folder: Path, case: str, **train: Any) -> dict[str, Any]:
    """Train, and return the losses and the rows of each step in this process; write the weights."""
    seen: list[list[Any]] = []

    def training_step(before: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        masks = inputs["attention_mask"].bool()
        rows = [ids[mask].tolist() for ids, mask in zip(inputs["input_ids"], masks, strict=True)]
        seen.append([rows, inputs["labels"].tolist()])
        return before(model, inputs, *args, **kwargs)

    override_method(trainer, "training_step", training_step)
    trainer.train(**train)
    check_engine(trainer, engine())
    weights = whole_weights(trainer)
    if RANK == 0:
        torch.save(weights, folder / f"{case}.pt")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "rows": seen}


def of_techniques(folder: Path, case: str) -> dict[str, Any]:
    """All techniques at once, or the one that the case names; saved, and resumed from the second step."""
    names = allowed(engine()) if case == "techniques" else (case,)
    trainer, resumed = (classification(folder / case, names, **pair("BertLayer"), **SAVING) for _ in range(2))
    for callback in (*trainer.callback_handler.callbacks, *resumed.callback_handler.callbacks):
        if isinstance(callback, ShardedCheckpointCallback):
            callback.max_shard_bytes = 20_000
    found = trained(trainer, folder, case)
    metrics = trainer.evaluate()
    last = folder / case / "checkpoint-2"
    again = trained(resumed, folder, f"{case}, resumed", resume_from_checkpoint=str(last))
    return {
        **found,
        "files": len(list(last.glob("model*.safetensors"))),
        "resumed": again["losses"],
        "metrics": [metrics["eval_loss"], metrics["eval_accuracy"]],
    }


def of_sharded_state(folder: Path, case: str) -> dict[str, Any]:
    """Stock's other checkpoint of FSDP2, a file for each process: saved, and resumed from the second step."""
    chosen = pair("BertLayer")
    chosen["fsdp_config"] = {**chosen["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}
    for variable in fsdp_on_cpu.ENVIRONMENT:  # without it transformers 5.8 does so by default
        del os.environ[variable]
    found = trained(classification(folder / case, **chosen, **SAVING), folder, case)
    last = folder / case / "checkpoint-2"
    resumed = classification(folder / case, **chosen, **SAVING)
    again = trained(resumed, folder, f"{case}, resumed", resume_from_checkpoint=str(last))
    files = sorted(str(path.relative_to(last)) for path in last.rglob("*.distcp"))
    return {**found, "files": files, "whole": (last / "model.safetensors").exists(), "resumed": again["losses"]}


def of_scale(folder: Path, case: str) -> dict[str, Any]:
    """A head that ignores the number of items, with accumulation."""
    trainer = technique_table.make_trainer((), folder, gradient_accumulation_steps=2, **pair("BertLayer"))
    return {**trained(trainer, folder, case), "accepts": trainer.model_accepts_loss_kwargs}


def of_causal_lm(folder: Path, case: str) -> dict[str, Any]:
    """The loss fused and the norm clipped."""
    fused = FusedCrossEntropyCallback()
    trainer = causal_lm(folder / case, fused, max_grad_norm=1.0, **pair())
    found = trained(trainer, folder, case)
    return {**found, "fused": fused.handle.record.fused, "real": dict(fused.handle.record.real)}


def of_lora(folder: Path, case: str, **train: Any) -> dict[str, Any]:
    """Adapters, with micro-batches and the fused loss; saved."""
    callbacks: list[Any] = [ShardedCheckpointCallback()]
    if "fused cross-entropy" in (names := allowed(engine())):
        callbacks.append(FusedCrossEntropyCallback())
    if "micro-batching" in names:
        callbacks.append(MicrobatchCallback(max_tokens=24))
    return trained(causal_lm(folder / "lora", *callbacks, lora=True, **pair(), **SAVING), folder, case, **train)


def of_resumed_lora(folder: Path, case: str) -> dict[str, Any]:
    """The same, and resumed."""
    found = of_lora(folder, "lora")
    last = str(folder / "lora" / "checkpoint-2")
    return {**found, "resumed": of_lora(folder, "lora, resumed", resume_from_checkpoint=last)["losses"]}


def of_bf16(folder: Path, case: str) -> dict[str, Any]:
    """How far the weights of a run in bfloat16 are from those of stock under the same engine."""
    settings = {"bf16": True, "optim": "adamw_torch", "learning_rate": 1e-3, **pair()}
    fused = FusedCrossEntropyCallback()
    ours, stock = causal_lm(folder, fused, **settings), causal_lm(folder, **settings)
    trained(ours, folder, case)
    trained(stock, folder, case)
    pairs = zip(whole_weights(ours).values(), whole_weights(stock).values(), strict=True)
    return {
        "real": dict(fused.handle.record.real),
        "furthest": max(float((a - b).abs().max()) for a, b in pairs),
    }


def of_nonfinite(folder: Path, case: str) -> dict[str, Any]:
    """A loss, then a gradient that is not finite in the second process alone."""
    callback = OverflowCallback()
    trainer = classification(folder / case, (), **pair("BertLayer"))
    spoil(trainer, here=RANK == 1)
    attach(trainer, callback)
    found = trained(trainer, folder, case)
    reports = [[report.step, report.case] for report in callback.reports]
    return {**found, "dropped": callback.nonfinite_steps, "reports": reports}


def of_refusals(folder: Path, case: str) -> dict[str, Any]:
    """What attach says to each technique that is refused, and to what one cannot work with."""
    found = {}
    for name, technique in TECHNIQUES.items():
        if "FSDP2" in technique.refused:
            found[name] = refused(lambda name=name: classification(folder / case, (name,), **pair("BertLayer")))
    paged = {"optim": "paged_adamw_8bit"}
    found["bitsandbytes optimizer"] = refused(lambda: classification(folder / case, (), **pair("BertLayer"), **paged))
    return found


def of_memory(folder: Path, case: str) -> dict[str, Any]:
    """What stock says to an 8-bit optimizer."""
    eight_bit = {"model": tiny.bert(), "train_dataset": tiny.rows(16)}
    stock = Trainer(args=tiny.arguments(folder / case, optim="adamw_bnb_8bit", **pair("BertLayer")), **eight_bit)
    return {"8-bit": refused(stock.train)}


def refused(call: Callable[[], Any]) -> str:
    """Return the error of a call."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


CASES: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "techniques": of_techniques,
    "scale": of_scale,
    "sharded state": of_sharded_state,
    "causal_lm": of_causal_lm,
    "lora": of_lora,
    "resumed lora": of_resumed_lora,
    "bf16": of_bf16,
    "nonfinite": of_nonfinite,
    "refusals": of_refusals,
    "memory": of_memory,
    **dict.fromkeys(TECHNIQUES, of_techniques),
}


def main(folder: str, engine: str, *cases: str) -> None:
    """Write what each case found in this process."""
    gc.freeze()  # the Trainer collects garbage at the start of each run
    if "deepspeed" in ENGINES[engine]:
        deepspeed_on_cpu.build_nothing()
    if engine == "FSDP2":
        os.environ.update(fsdp_on_cpu.ENVIRONMENT)
    with sharding() if engine == "FSDP2" else nullcontext():
        found = {case: CASES[case](Path(folder), case) for case in cases}
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
