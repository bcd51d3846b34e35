"""Trainings of adapters: those of peft, on whole and on quantised weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer

import tiny
from client import Arrange, Client, llama
from plain_clients import causal

LAYERS = ["q_proj", "v_proj"]


def adapted(folder: Path, arrange: Arrange, *, config: peft.PeftConfig, base: Callable[[Path], Any]) -> Trainer:
    """A causal language model with an adapter."""
    model = base(folder)
    torch.manual_seed(1)
    return causal(folder, arrange, model=peft.get_peft_model(model, copy.deepcopy(config)))


def whole(folder: Path) -> Any:
    """Return weights of 32 bits."""
    return llama()


def in_four_bits(folder: Path) -> Any:
    """Return weights of 4 bits, by way of a folder, prepared as peft does."""
    tiny.llama(hidden_size=64, intermediate_size=128).save_pretrained(folder / "whole")
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = LlamaForCausalLM.from_pretrained(folder / "whole", quantization_config=quantized, device_map="cpu")
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def by(config: peft.PeftConfig, base: Callable[[Path], Any] = whole) -> Client:
    """Return a client of this adapter."""
    return Client(functools.partial(adapted, config=config, base=base))


LORA = functools.partial(peft.LoraConfig, task_type="CAUSAL_LM", r=4, target_modules=LAYERS, init_lora_weights=False)

CLIENTS = {
    "peft, LoRA": by(LORA()),
    "peft, DoRA": by(LORA(use_dora=True)),
    "peft, LoRA and a trained head": by(LORA(modules_to_save=["lm_head"])),
    "peft, LoRA on 4-bit weights (QLoRA)": by(LORA(), in_four_bits),
    "peft, IA3": by(
        peft.IA3Config(task_type="CAUSAL_LM", target_modules=[*LAYERS, "down_proj"], feedforward_modules=["down_proj"])
    ),
    "peft, VeRA": by(peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=LAYERS)),
    "peft, OFT": by(peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=4, target_modules=LAYERS)),
    "peft, prompt tuning": by(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "peft, prefix tuning": by(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "peft, P-tuning": by(peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)),
}
