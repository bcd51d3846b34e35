"""Which estimates reuse a recorded step, and which record one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from slow_cases import slow_except

import tiny
from hf_memopt import estimate
from hf_memopt.prediction.memory.recording import sessions
from hf_memopt.prediction.memory.recording.step import record_step
from hf_memopt.techniques import freeze


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that grows with every recorded step; nothing was recorded before."""
    sessions.Session.traces.clear()
    seen: list[str] = []

    def counting(model: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(model).__name__)
        return record_step(model, *args, **kwargs)

    monkeypatch.setattr(sessions, "record_step", counting)
    return seen


def of_bert(**changed: Any) -> Any:
    return estimate(tiny.bert_config(), **{"batch_size": 16, "seq_len": 16, "gpu": "RTX 3090", **changed})


def test_another_optimizer_or_allocator_needs_no_new_recording(recordings: list[str]) -> None:
    first = of_bert()
    of_optimizer = ({"optim": "sgd"}, {"optim": "adamw_bnb_8bit", "embedding_bits": 8}, {"weight_decay": 0.01})
    of_allocator = ({"expandable_segments": True}, {"torch_empty_cache_steps": 1})
    for other in (*of_optimizer, *of_allocator, {"max_grad_norm": 0.0}):
        of_bert(**other)
    assert len(recordings) == 1
    of_bert(gradient_accumulation_steps=2)
    of_bert(gradient_accumulation_steps=8)
    assert len(recordings) == 2
    assert of_bert().peak_allocated_bytes == first.peak_allocated_bytes
    assert len(recordings) == 2


CHANGES: tuple[dict[str, Any], ...] = (
    *({"batch_size": 8}, {"seq_len": 32}, {"precision": "bf16"}, {"checkpointing": True}, {"micro_batch_size": 8}),
    *({"gradient_release": True, "max_grad_norm": 0.0}, {"label_smoothing_factor": 0.1}, {"padding": False}),
    *({"eval_batch_size": 4}, {"attn_implementation": "eager"}, {"weights_dtype": "bfloat16"}, {"gpu": "T4"}),
    *({"freeze": "*embeddings*"}, {"lora": 4}, {"lora": LoraConfig(target_modules=["query"])}, {"task": "masked-lm"}),
    {"prepare": (partial(freeze, patterns=("*embeddings*",)),)},
)


@pytest.mark.parametrize("other", slow_except(CHANGES[::4], CHANGES), ids=lambda other: next(iter(other)))
def test_what_changes_the_step_is_recorded_anew(recordings: list[str], other: dict[str, Any]) -> None:
    of_bert(precision="fp32")
    of_bert(**{"precision": "fp32", **other})
    assert len(recordings) == 2


def test_adapters_quantised_weights_and_frozen_parameters_are_recorded_once(recordings: list[str]) -> None:
    def set_ups() -> list[dict[str, Any]]:
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        quantised = [{"load_in": name, "lora": rank} for name in ("nf4", "int8") for rank in (4, 8)]
        frozen = [{"freeze": ["embeddings"]}, {"lora": 4, "freeze": "layers:0"}]
        return [{"lora": 4}, {"lora": config}, *frozen, *quantised]

    for optim in ("adamw_torch", "sgd"):
        for chosen in set_ups():
            estimate(tiny.llama_config(), batch_size=2, seq_len=8, optim=optim, **chosen)
    assert len(recordings) == len(set_ups()) == len(sessions.Session.traces)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (transformers.BertForMaskedLM(tiny.bert_config()), {}),
        (tiny.bert_config(), {"prepare": (partial(freeze, patterns=("*embeddings*",)),)}),
        (tiny.bert_config(), {"checkpointing": {"context_fn": torch.utils.checkpoint.noop_context_fn}}),
    ],
    ids=["a module", "prepare", "a function of checkpointing"],
)
def test_what_may_change_between_two_calls_is_recorded_every_time(
    recordings: list[str], model: Any, settings: dict[str, Any]
) -> None:
    for _ in range(2):
        estimate(model, batch_size=2, seq_len=8, **settings)
    assert (len(recordings), len(sessions.Session.traces)) == (2, 0)


def test_a_class_that_was_patched_is_recorded_anew(recordings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for reentrant in (False, True, False, True):  # options of checkpointing are kept apart
        of_bert(checkpointing={"use_reentrant": reentrant})
    assert len(recordings) == 2
    layer = transformers.models.bert.modeling_bert.BertLayer
    plain = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *args, **kwargs: plain(self, *args, **kwargs))
    of_bert(checkpointing={"use_reentrant": False})
    assert len(recordings) == 3


@pytest.mark.skipif(tiny.IS_BEFORE_5_17, reason="the experts of 5.8 do not run backward on the meta device")
def test_experts_are_computed_as_the_configuration_says(recordings: list[str]) -> None:
    peaks: dict[str, int] = {}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
    for experts in ("batched_mm", "grouped_mm", "batched_mm", "grouped_mm"):
        config = transformers.MixtralConfig(num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, **sizes)
        config._experts_implementation = experts  # private, seen in transformers 5.8.1, 5.17.0 and 5.23.0
        found = estimate(config, batch_size=4, seq_len=32).peak_allocated_bytes
        assert peaks.setdefault(experts, found) == found
    assert len(recordings) == len(set(peaks.values())) == 2
