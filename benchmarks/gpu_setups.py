"""The cases of ``gpu.py``: which models, which set-ups, in which order; what a case means for the estimate and for the
Trainer. Light: torch and transformers are imported where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

CHECKPOINTING = {"use_reentrant": False}
LORA_RANK = 16


@dataclass(frozen=True)
class Model:
    """A model by its well-known name, the shape of its batches, and what makes a tiny one of its configuration."""

    known_as: str
    batch_size: int
    seq_len: int | None
    tiny: dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What of a run differs from the defaults of ``StepSettings``; ``needs`` are packages that may be missing."""

    precision: str = "bf16"
    accumulation: int = 1
    optim: str = "adamw_torch_fused"
    checkpointing: bool = False
    prepare: str | None = None
    padding: bool = True
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A model in a set-up."""

    model: str
    setup: str
    tiny: bool = False

    @property
    def name(self) -> str:
        """The name in tables, for ``--only`` and in the rows."""
        return f"{self.model}, {self.setup}{' (tiny)' if self.tiny else ''}"

    @property
    def shape(self) -> Model:
        """The model and its batches."""
        return MODELS[self.model]

    @property
    def settings(self) -> Setup:
        """The set-up."""
        return SETUPS[self.setup]

    @property
    def batch_size(self) -> int:
        """Examples of a micro-batch."""
        return 2 if self.tiny else self.shape.batch_size

    @property
    def seq_len(self) -> int | None:
        """Tokens of a row; None for a model without text."""
        seq_len = self.shape.seq_len
        return 16 if self.tiny and seq_len is not None else seq_len

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


_ENCODER = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 1, "head_dim": 32, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
_T5 = {"vocab_size": 512, "d_model": 64, "d_ff": 128, "d_kv": 32, "num_heads": 2, "num_layers": 2}
_VIT = {name: size for name, size in _ENCODER.items() if name != "vocab_size"}

MODELS = {
    "BERT-large": Model("bert-large-uncased", 32, 128, _ENCODER),
    "RoBERTa-base": Model("roberta-base", 32, 256, _ENCODER),
    "DeBERTa-v3-base": Model("deberta-v3-base", 16, 256, {**_ENCODER, "pooler_hidden_size": 64}),
    "GPT-2-medium": Model("gpt2-medium", 8, 512, {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "Llama-3.2-1B": Model("Llama-3.2-1B", 4, 512, _DECODER),
    "Qwen3-0.6B": Model("Qwen3-0.6B", 4, 512, {**_DECODER, "layer_types": None}),
    "T5-base": Model("t5-base", 16, 256, {**_T5, "num_decoder_layers": 2}),
    "ViT-large": Model("vit-large-patch16-224", 32, None, {**_VIT, "image_size": 32, "patch_size": 8}),
}

SETUPS = {
    "fp32": Setup(precision="fp32"),
    "bf16": Setup(accumulation=2),
    "bf16 + checkpointing": Setup(checkpointing=True),
    "8-bit Adam": Setup(optim="adamw_bnb_8bit", needs=("bitsandbytes",)),
    "frozen body": Setup(prepare="frozen body", accumulation=2),
    "LoRA": Setup(prepare="LoRA", needs=("peft",)),
    "bf16 without padding": Setup(padding=False),  # attention without a mask: another kernel
}


def ordered_cases(*, tiny: bool = False) -> list[Case]:
    """Return every model in every set-up, so that each prefix is spread over both: the first eight cases are eight
    models in all set-ups, and no model comes again before every other one did.
    """
    setups = list(SETUPS)
    return [
        Case(model, setups[(turn + place) % len(setups)], tiny)
        for turn in range(len(setups))
        for place, model in enumerate(MODELS)
    ]


def missing_package(case: Case) -> str | None:
    """Return what cannot be imported of what the case needs, or None."""
    return next((name for name in case.settings.needs if find_spec(name) is None), None)


# ---- The model ------------------------------------------------------------------------------------------------------


def model_class_and_config(case: Case) -> tuple[type, Any]:
    """Return class and configuration that the estimate and the real run are both built from."""
    from hf_memopt.prediction.memory.models import load_model

    model: Any = load_model(case.shape.known_as).model
    config = model.config
    if case.tiny:
        config = type(config)(**{**config.to_dict(), **case.shape.tiny})
    return type(model), config


def build_model(case: Case, device: str) -> Any:
    """Return the model on ``device``, in float32, with random weights and none of its parts changed yet."""
    import torch

    model_class, config = model_class_and_config(case)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = model_class(config)
    return model


def freeze_body(model: Any) -> None:
    """Freeze the embeddings and all layers but the last, so that a tied head leaves something to train."""
    from hf_memopt.training.binding.parameters import layer_stacks
    from hf_memopt.training.techniques.freezing.freezing import freeze

    last = min(len(layers) for layers in layer_stacks(model).values()) - 1
    freeze(model, ["embeddings", f"layers:0-{last - 1}"])


def add_lora(model: Any) -> None:
    """Put adapters on every linear layer but the head, and freeze the rest."""
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules="all-linear"))


PREPARATIONS: dict[str | None, tuple[Callable[[Any], None], ...]] = {
    None: (),
    "frozen body": (freeze_body,),
    "LoRA": (add_lora,),
}


# ---- The two readings of a set-up -----------------------------------------------------------------------------------


def estimate_settings(case: Case) -> dict[str, Any]:
    """Return the settings of ``estimate``."""
    setup = case.settings
    return {
        "precision": setup.precision,
        "optim": setup.optim,
        "gradient_accumulation_steps": setup.accumulation,
        "checkpointing": CHECKPOINTING if setup.checkpointing else False,
        "padding": setup.padding,
        "prepare": PREPARATIONS[setup.prepare],
    }


def training_arguments(case: Case, output_dir: str, *, steps: int, use_cpu: bool) -> Any:
    """Return the ``TrainingArguments``: what the case says, no saving, and the Trainer's defaults otherwise."""
    from transformers import TrainingArguments

    from hf_memopt.training.binding import checkpointing_arguments

    setup = case.settings
    return TrainingArguments(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=case.batch_size,
        gradient_accumulation_steps=setup.accumulation,
        bf16=setup.precision == "bf16",
        optim=setup.optim,
        use_cpu=use_cpu,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        **(checkpointing_arguments(**CHECKPOINTING) if setup.checkpointing else {}),
    )
