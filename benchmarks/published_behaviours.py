"""What older software did differently, as one table: library, versions, kind of loop -> a change of the estimate.

Each entry is a documented behaviour of those versions, put in place through public extension points: settings of
``estimate``, functions in ``prepare=``, ``PreTrainedModel.loss_function``, module hooks, and the attention and cache
interfaces of transformers. Nothing depends on a single measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from published_cases import Case
from published_changes import (
    adamw_of_transformers,
    adapters_like_weights,
    bf16_adapters_and_heads,
    cache_without_copy,
    copy_in_loss,
    experts_in_a_loop,
    keep_projections_of_keys,
    upcast_and_copy_in_loss,
)
from torch import nn

LOOPS = ("Trainer", "SFTTrainer", "manual", "function")
Settings = dict[str, Any]


@dataclass(frozen=True)
class Behaviour:
    """A behaviour of some versions of a library.

    Attributes:
        name: what happened then.
        library: as in ``Case.versions``.
        before: the first (major, minor) that no longer has it; every earlier one does.
        change: changes the settings of an estimate in place.
        source: where it is documented.
        loops: the kinds of loop that it concerns.
        model_types: the families of models that it concerns; None for all.
        applies: a further condition on the set-up.
    """

    name: str
    library: str
    before: tuple[int, int]
    change: Callable[[Settings], None]
    source: str
    loops: tuple[str, ...] = LOOPS
    model_types: frozenset[str] | None = None
    applies: Callable[[Case], bool] = lambda case: True

    def concerns(self, case: Case, model_type: str) -> bool:
        """Return whether the run of ``case`` had this behaviour."""
        version = case.version(self.library)
        if version is None or version >= self.before:
            return False
        of_model = self.model_types is None or model_type in self.model_types
        return case.loop in self.loops and of_model and self.applies(case)


def behaviours_of(case: Case, model_type: str) -> list[Behaviour]:
    """Return the behaviours that the run of ``case`` had and today's software has not, in the table's order."""
    return [behaviour for behaviour in BEHAVIOURS if behaviour.concerns(case, model_type)]


def _set(**values: Any) -> Callable[[Settings], None]:
    def change(settings: Settings) -> None:
        settings.update(values)

    return change


def _prepare(function: Callable[[nn.Module], None], *, first: bool = False) -> Callable[[Settings], None]:
    """Return the change that runs ``function`` on the model, before quantisation and LoRA or after them."""

    def change(settings: Settings) -> None:
        given = settings.get("prepare", ())
        settings["prepare"] = (function, *given) if first else (*given, function)

    return change


# ---- The table

_UPCASTING = frozenset(
    {"llama", "mistral", "mixtral", "granite", "qwen2", "qwen2_moe", "gemma", "gemma2", "phi", "phi3"}
)
_OWN_LOSS = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "gpt_neox"})
_SOURCE = "github:huggingface/transformers "


def _is_stored_in_floats(case: Case) -> bool:
    """Return whether the weights are floats, or 4-bit weights are stored as such, so that FSDP can cut them."""
    return case.quantization is None or "bnb_4bit_quant_storage" in case.quantization_config


BEHAVIOURS: tuple[Behaviour, ...] = (
    Behaviour(
        "the loss casts the logits to float32 and copies their shifted part",
        "transformers",
        (4, 49),
        _prepare(upcast_and_copy_in_loss),
        _SOURCE + "v4.48.1 loss/loss_utils.py, ForCausalLMLoss; before 4.46 each model's forward",
        model_types=_UPCASTING,
    ),
    Behaviour(
        "the loss copies the shifted logits in their own dtype",
        "transformers",
        (4, 49),
        _prepare(copy_in_loss),
        _SOURCE + "v4.48.1 models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeForCausalLM.forward",
        model_types=_OWN_LOSS,
    ),
    Behaviour(
        "the key-value cache keeps keys and values without a copy",
        "transformers",
        (4, 54),
        _prepare(cache_without_copy),
        _SOURCE + "v4.53.3 cache_utils.py, DynamicCache.update",
        loops=("manual", "function"),
    ),
    Behaviour(
        "experts are linears of their own, run one after the other",
        "transformers",
        (5, 0),
        _prepare(experts_in_a_loop, first=True),
        _SOURCE + "v4.57.1 models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock",
        model_types=frozenset({"mixtral"}),
    ),
    Behaviour(
        "checkpointing leaves use_cache on, and keys and values are views of the whole projection",
        "transformers",
        (4, 53),
        _prepare(keep_projections_of_keys),
        _SOURCE + "v4.51.3 models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.forward",
        model_types=frozenset({"gpt_bigcode"}),
        applies=lambda case: bool(case.settings.get("checkpointing")),
    ),
    Behaviour(
        "bfloat16 adapters, embeddings and head after prepare_model_for_kbit_training",
        "trl",
        (0, 24),
        _prepare(bf16_adapters_and_heads),
        "github:huggingface/trl v0.13.0 to v0.23.0 trl/trainer/utils.py, peft_module_casting_to_bf16",
        loops=("SFTTrainer",),
        applies=lambda case: case.kbit_preparation and case.settings["precision"] == "bf16",
    ),
    Behaviour(
        "adapters have the dtype of 16-bit weights",
        "peft",
        (0, 11),
        _prepare(adapters_like_weights),
        "github:huggingface/peft docs/source/developer_guides/troubleshooting.md, Selecting the dtype of the adapter",
        applies=lambda case: case.lora is not None and _is_stored_in_floats(case),
    ),
    Behaviour(
        "softmax keeps its input",
        "torch",
        (1, 11),
        _set(attn_implementation="eager_with_kept_input"),
        "github:pytorch/pytorch v1.10.0 tools/autograd/derivatives.yaml, _softmax (self in the backward formula)",
        applies=lambda case: case.settings.get("attn_implementation") == "eager",
    ),
    Behaviour(
        "zero_grad keeps the gradients",
        "torch",
        (2, 0),
        _set(zero_grad_to_none=False),
        "github:pytorch/pytorch release notes of 2.0: zero_grad sets gradients to None by default",
    ),
    Behaviour(
        "the Trainer's AdamW is transformers' own, a loop with one temporary",
        "transformers",
        (4, 16),
        _set(optimizer_memory=adamw_of_transformers),
        _SOURCE + "v4.15.0 trainer.py, create_optimizer; optimization.py, AdamW.step",
        loops=("Trainer",),
        applies=lambda case: case.settings["optim"] == "adamw_torch",
    ),
    Behaviour(
        "8-bit optimizers keep embeddings at 8 bits",
        "transformers",
        (4, 19),
        _set(embedding_bits=8),
        _SOURCE + "v4.19.0 trainer.py is the first with an override by GlobalOptimManager",
        loops=("Trainer",),
        applies=lambda case: "8bit" in case.settings["optim"],
    ),
)
