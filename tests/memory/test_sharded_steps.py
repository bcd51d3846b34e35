"""Sharded steps: the prediction for one of two processes against torch's allocator in two processes of gloo."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from host_semantics import HostSemantics
from sharded_ranks import batch, build

from hf_memopt import Estimate, NotEstimableError, Recipe, StepSettings, estimate
from hf_memopt.binding.fused_loss import chunked_loss
from hf_memopt.memory.allocator import ReplayPlan
from hf_memopt.memory.allocator.replay import replay
from hf_memopt.memory.distributed import bucket_bytes, shard_facts, sharded_step
from hf_memopt.memory.optimizers import OptimizerMemory, ParameterFacts, parameter_facts
from hf_memopt.memory.recording.passes import autocast_dtype
from hf_memopt.memory.recording.step import cut_batch, record_step
from hf_memopt.memory.tracking import StorageTracker
from two_ranks import run_pair

LLAMA = {
    "model": "LlamaForCausalLM",
    "config": "LlamaConfig",
    "size": {
        "vocab_size": 1999,  # odd: a shard is padded
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "batch": (2, 48),
    "precision": "fp32",
}
BERT = {
    "model": "BertForSequenceClassification",
    "config": "BertConfig",
    "size": {
        "vocab_size": 1999,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "batch": (4, 64),
    "precision": "fp32",
    "layers": ["BertLayer"],
}
GPT2 = {
    "model": "GPT2LMHeadModel",  # its embeddings are tied
    "config": "GPT2Config",
    "size": {"vocab_size": 1999, "n_embd": 128, "n_layer": 3, "n_head": 4},
    "batch": (2, 48),
    "precision": "fp32",
}
EVEN = {**LLAMA, "size": {**LLAMA["size"], "vocab_size": 2000}}  # torch's CPU copies a gradient before it pads it
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, bf16": {**LLAMA, "precision": "bf16"},
    "llama, checkpointing": {**LLAMA, "checkpointing": True, "batch": (4, 96)},
    "llama, tied": {**LLAMA, "size": {**LLAMA["size"], "tie_word_embeddings": True}},
    "llama, accumulation": {**LLAMA, "accumulation": 3},
    "llama, frozen embeddings": {**LLAMA, "frozen": "embed_tokens"},
    "llama, LoRA": {**LLAMA, "precision": "bf16", "lora": 8, "batch": (4, 96)},
    "llama, micro-batches": {**EVEN, "micro_batch": 1},
    "llama, fused": {**EVEN, "chunk_bytes": 100_000},
    "llama, bf16, fused": {**EVEN, "precision": "bf16", "chunk_bytes": 100_000},
    "llama, LoRA, fused": {**LLAMA, "precision": "bf16", "lora": 8, "batch": (4, 96), "chunk_bytes": 100_000},
    "llama, fused, micro-batches and accumulation": {
        **LLAMA,
        "chunk_bytes": 100_000,
        "batch": (3, 48),
        "micro_batch": 1,
        "accumulation": 2,
    },
    "llama, bf16, fused, micro-batches, accumulation and checkpointing": {
        **LLAMA,
        "precision": "bf16",
        "chunk_bytes": 100_000,
        "batch": (4, 96),
        "micro_batch": 2,
        "accumulation": 3,
        "checkpointing": True,
    },
    "bert": BERT,
    "bert, bf16": {**BERT, "precision": "bf16"},
    "gpt2": GPT2,
    "gpt2, fused": {**GPT2, "batch": (8, 96), "chunk_bytes": 100_000},
}
FAST = ("llama", "llama, fused, micro-batches and accumulation")


class ExactAllocator:
    """Counts bytes as they are, without blocks."""

    def __init__(self) -> None:
        self.sizes: dict[Hashable, int] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0

    def state(self) -> object:
        return object()  # unlike every other: each pass is replayed

    def malloc(self, key: Hashable, size_bytes: int) -> int:
        self.sizes[key] = size_bytes
        self.allocated += size_bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return size_bytes

    def free(self, key: Hashable) -> int:
        size_bytes = self.sizes.pop(key)
        self.allocated -= size_bytes
        return size_bytes


@contextmanager
def products_of_the_cpu() -> Iterator[None]:
    """Let the fused loss cast the factors of its products in float32, as it does on a CPU, which has no such kernel."""

    def wide_product(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if one.itemsize > 2:
            return one @ other
        with torch._C.DisableTorchFunction():  # and with it the autocast of ``HostSemantics``
            return one.to(dtype) @ other.to(dtype)

    with mock.patch.object(chunked_loss, "wide_product", wide_product):
        yield


def predicted(case: dict[str, Any]) -> int:
    """Return the peak of a step with optimizer states, as the estimate's own parts find it, for kernels of the CPU."""
    settings = StepSettings(
        precision=case["precision"],
        world_size=2,
        strategy="fsdp2",
        gradient_accumulation_steps=case.get("accumulation", 1),
        micro_batch_size=case.get("micro_batch"),
        optim="adamw_torch",
        max_grad_norm=0,
    )
    count = case["batch"][0]
    rows = case.get("micro_batch", count)
    model = build(case, "meta")
    facts = shard_facts(parameter_facts(model), settings)
    tracker = StorageTracker(padding=False)
    semantics = HostSemantics(tracker=tracker, autocast=autocast_dtype(settings.precision))
    sharded = sharded_step(model, settings)
    assert sharded is not None
    with sharded.sharding(), products_of_the_cpu():
        inputs = batch(case, "meta")
        options = {"tracker": tracker, "semantics": semantics, "sharded": sharded}
        if rows < count:
            options["micro_batch"] = cut_batch(inputs, count, rows)
        trace = record_step(model, inputs, settings, **options)
    state = tuple(fact.size_bytes for fact in facts for _ in range(2))  # AdamW's averages; it steps after the peak
    optimizer = OptimizerMemory(state, 0, (), ())
    plan = ReplayPlan(settings, optimizer, (), -(-count // rows), ())
    allocator: Any = ExactAllocator()
    replay(trace, plan, allocator)
    return int(allocator.peak_allocated)


@pytest.mark.parametrize("names", [FAST, pytest.param(tuple(set(CASES) - set(FAST)), marks=pytest.mark.slow)])
def test_a_step_has_the_bytes_of_torchs_allocator_in_each_of_two_processes(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """The second process has less where a shard is padded: 0.02 % here.

    Measured in November 2026 with torch 2.13 and accelerate 1.15: within 0.03 %, but -0.11 % where checkpointing keeps
    the state of random numbers on the host, and -0.84 % of BERT in bf16, where oneDNN takes memory for itself.
    """
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps({name: CASES[name] for name in names}))
    program = str(Path(__file__).with_name("sharded_ranks.py"))
    ranks = run_pair(tmp_path, program, str(tmp_path), str(cases), timeout_seconds=120)
    for name in names:
        for first, later in (found[name] for found in ranks):
            assert first < later  # which has optimizer states
            assert predicted(CASES[name]) == pytest.approx(later, rel=0.01), name


def one_process(**changed: Any) -> Estimate:
    config = transformers.LlamaConfig(**LLAMA["size"])
    return estimate(config, batch_size=2, seq_len=48, **{"precision": "fp32", "max_grad_norm": 0, **changed})


def test_ddp_holds_buckets_of_all_gradients_beside_them() -> None:
    alone, shared = one_process(), one_process(world_size=2, strategy="ddp")
    gradients_bytes = 4 * alone.trainable_parameters
    more_bytes = shared.peak_allocated_bytes - alone.peak_allocated_bytes
    assert gradients_bytes <= more_bytes <= gradients_bytes + 512  # a block of the allocator
    assert any(note.startswith("bytes of one of 2 GPUs, DDP;") for note in shared.notes)


def test_buckets_are_filled_from_the_last_parameter() -> None:
    """The first has 1 MiB, the others 25 MiB, and each ends with the parameter that fills it."""
    mib = 2**20
    facts = [ParameterFacts(str(index), (size * mib // 4,), 4, False) for index, size in enumerate((7, 20, 10, 2))]
    assert bucket_bytes(facts, StepSettings(world_size=2)) == (2 * mib, 30 * mib, 7 * mib)
    assert (
        bucket_bytes(facts, StepSettings()) == bucket_bytes(facts, StepSettings(world_size=2, strategy="fsdp2")) == ()
    )


def test_two_processes_hold_a_half_each_and_offload_nothing_of_it() -> None:
    alone, sharded = one_process(), one_process(world_size=2, strategy="fsdp2")
    offloaded = one_process(world_size=2, strategy="fsdp2", offload_params=True)
    for part in ("weights", "optimizer state"):
        assert sharded.components[part] == pytest.approx(alone.components[part] / 2, rel=0.02)
    assert offloaded.components["optimizer state"] == offloaded.components["gradients"] == 0
    assert offloaded.components["weights"] < 0.01 * alone.components["weights"]  # buffers
    assert offloaded.host_bytes == pytest.approx(8 * alone.trainable_parameters, rel=0.01)  # a half of 16
    assert sharded.parameters == alone.parameters
    assert sharded.trainable_parameters == alone.trainable_parameters


def test_micro_batches_hold_gradients_of_shards_and_accumulation_those_of_the_model() -> None:
    shared = {"world_size": 2, "strategy": "fsdp2"}
    accumulated = one_process(**shared, gradient_accumulation_steps=2)
    cut = one_process(**shared, micro_batch_size=1)
    gradients_bytes = 4 * cut.trainable_parameters
    assert accumulated.components["gradients"] > 0.9 * gradients_bytes
    assert cut.components["gradients"] < 0.51 * gradients_bytes
    assert accumulated.step_costs is not None
    assert cut.step_costs is not None
    assert cut.step_costs.micro_batches == accumulated.step_costs.micro_batches == 2
    sent = [one.step_costs.communication.link_bytes for one in (accumulated, cut)]
    assert sent[1] - sent[0] == pytest.approx(gradients_bytes / 2, rel=0.01)  # each micro-batch reduces its own


def test_a_recipes_accumulation_is_shared_by_the_processes() -> None:
    mine = Recipe("mine", "tests", effective_batch_size=32, per_device_train_batch_size=4)
    assert [one_process(recipe=mine, world_size=size).settings.gradient_accumulation_steps for size in (1, 2, 8)] == [
        8,
        4,
        1,
    ]


REFUSED = [
    ({"strategy": "zero1"}, "strategy='zero1' is invalid; expected 'auto', 'ddp', 'fsdp2', 'zero2' or 'zero3'"),
    ({"strategy": "zero2", "micro_batch_size": 1}, "micro_batch_size=1, strategy='zero2' are incompatible"),
    ({"strategy": "ddp", "offload_params": True}, "what goes to the host are shards"),
    ({"strategy": "ddp", "gradient_release": True, "max_grad_norm": 0}, "world_size=2 are incompatible"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_what_does_not_work_in_several_processes_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(**{"world_size": 2, **asked})
    assert message in str(error.value)


def test_a_model_is_as_before_its_sharded_recording() -> None:
    model = build(LLAMA, "meta")
    before = {name: (id(one), one.untyped_storage().nbytes()) for name, one in model.named_parameters()}
    sharded = sharded_step(model, StepSettings(precision="bf16", world_size=2, strategy="fsdp2"))
    assert sharded is not None
    with sharded.sharding():
        shards = dict(model.named_parameters())
        assert {one.dtype for one in shards.values()} == {torch.bfloat16}
        table = shards["model.embed_tokens.weight"]
        assert (tuple(table.shape), table.untyped_storage().nbytes()) == ((1999, 128), 1000 * 128 * 4)
    assert {name: (id(one), one.untyped_storage().nbytes()) for name, one in model.named_parameters()} == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_embeddings_inside_a_named_layer_are_a_note() -> None:
    found = estimate(
        transformers.BertConfig(**BERT["size"]),
        task="sequence-classification",
        batch_size=1,
        seq_len=8,
        world_size=2,
        strategy="fsdp2",
    )
    assert any("pass fsdp_config={'transformer_layer_cls_to_wrap': ['BertLayer']}" in note for note in found.notes)


def test_a_parameter_of_two_units_is_not_estimable() -> None:
    """As of BERT's head, whose bias is tied; FSDP2 raises at the first step."""
    config = transformers.BertConfig(**BERT["size"])
    with pytest.raises(NotEstimableError, match=r"strategy='fsdp2' with cls\.predictions\.\S*bias, which is tied"):
        estimate(config, task="masked-lm", batch_size=1, seq_len=8, world_size=2, strategy="fsdp2")
