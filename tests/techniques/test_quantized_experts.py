"""Experts in 4 bits: gradients against stock's over the dequantised weights, bytes, loading, what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from slow_cases import slow_except
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import tiny
from hf_memopt import ExpertsConfig, Recipe, add_adapters, attach, estimate, plan, prepare_quantized, stream_layers
from hf_memopt.techniques import checkpoint_layers, quantize_experts
from technique_table import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*rank_pattern.*:RuntimeWarning"),
]
SIZES = {
    **{"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 16},
    **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2},
    **{"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "router_jitter_noise": 0.0, "attention_dropout": 0.0},
}
FAMILIES = (
    *("mixtral", "qwen2_moe", "gpt_oss", "qwen3_moe", "olmoe", "glm4_moe", "granitemoe", "ernie4_5_moe", "phimoe"),
    *("minimax", "nemotron_h", "hunyuan_v1_moe", "afmoe", "flex_olmo"),
)
EIGHT = {"num_local_experts": 8, "num_experts": 8}
IDS = torch.randint(5, 90, (2, 24), generator=torch.Generator().manual_seed(0))


def mixture(kind: str = "mixtral", dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changed})
    model = AutoModelForCausalLM.from_config(config)
    if kind == "granitemoe" and not any(hasattr(module, "has_gate") for module in model.modules()):
        pytest.skip("its class does not use transformers' experts interface before 5.17")
    return model.to(dtype).train()


def dequantised(model: Any) -> Any:
    """Return stock's model with the values that the stacks of a copy have."""
    made = copy.deepcopy(model)
    handle = quantize_experts(made)
    handle.remove()
    made.set_experts_implementation("grouped_mm")
    return made


def trained(model: Any, **batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(0)  # PhiMoE's router draws
    loss = model(input_ids=IDS, labels=IDS, **batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", slow_except(("mixtral", "qwen2_moe", "gpt_oss"), FAMILIES))
def test_losses_and_gradients_are_those_of_the_dequantised_weights(kind: str, dtype: torch.dtype) -> None:
    """To the bit; shared experts, biases, interleaved and transposed weights among them, checkpointed too."""
    model = mixture(kind, dtype)
    whole = dequantised(model)
    names = quantize_experts(model).names
    assert all("experts" in name for name in names)
    assert same(trained(model), trained(whole))
    if model.supports_gradient_checkpointing:
        checkpoint_layers(model)
        checkpoint_layers(whole)
        assert same(trained(model), trained(whole))


def test_adapters_over_stacks_load_over_stocks_model(tmp_path: Path) -> None:
    model = mixture()
    whole = dequantised(model)
    quantize_experts(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    logits = adapted.eval()(IDS).logits
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, logits)


def test_streamed_layers_fetch_stacks_too() -> None:
    """The experts wait on the host, and losses and gradients are the same."""
    model = mixture(num_hidden_layers=4)
    quantize_experts(model, double_quant=True)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    whole = copy.deepcopy(adapted)
    checkpoint_layers(whole)
    stack_bytes = sum(one.nbytes for one in model.model.layers[0].mlp.experts.buffers())
    with stream_layers(adapted, device="cpu") as handle:
        for _ in range(2):
            assert same(trained(adapted), trained(whole))
        assert handle.ring.peak_bytes >= 2 * stack_bytes
        adapted.to("cpu")
    assert same(trained(adapted), trained(whole))


@pytest.mark.slow
def test_mixtral_and_qwen_fit() -> None:
    settings = {"batch_size": 1, "seq_len": 512, "lora": 16, "load_in": "nf4", "gpu": "RTX 4090", "precision": "bf16"}
    settings |= {"checkpointing": True, "autocast_cache": False, "lora_targets": ("q_proj", "v_proj")}
    stocks = estimate("Mixtral-8x7B", **settings)
    assert any("quantize_experts=True puts experts into 4 bits" in note for note in stocks.notes)
    found = estimate("Mixtral-8x7B", quantize_experts=True, **settings)
    assert found.parameters == stocks.parameters
    assert found.flops == stocks.flops
    assert found.total_bytes < 34 * 2**30 < 80 * 2**30 < stocks.total_bytes
    assert found.step_time is not None
    assert any("each is assumed to get as many tokens" in note for note in found.notes)
    streamed = estimate("Mixtral-8x7B", quantize_experts=True, streamed=True, **{**settings, "checkpointing": False})
    assert streamed.total_bytes < 4 * 2**30
    assert 20 * 2**30 < streamed.host_bytes < found.components["weights"]
    assert streamed.step_time is not None


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "deepseek"])
def test_loading_quantises_experts_as_afterwards(kind: str, tmp_path: Path) -> None:
    if kind == "deepseek":
        kind, changed = "ernie4_5_moe", {"moe_layer_start_index": 0}
    else:
        changed = {}
    mixture(kind, torch.bfloat16, **changed).save_pretrained(tmp_path, max_shard_size="100KB")
    config = ExpertsConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=config, output_loading_info=True
    )
    assert not any(report.values())
    stocks = transformers.BitsAndBytesConfig(**{**config.to_diff_dict(), "quant_method": "bitsandbytes"})
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=stocks)
    quantize_experts(whole, double_quant=True)
    assert loaded.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded.train()(IDS.to(loaded.device)).logits, whole.train()(IDS.to(whole.device)).logits)


def test_the_trainer_trains_and_resumes(tmp_path: Path) -> None:
    """A recipe's QLoRA: adapters on attention, loaded expert by expert, a checkpoint and the rest of the run."""
    mixture("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "model")
    recipe = Recipe("mixture", "", lora=4, load_in="nf4", quantize_experts=True, effective_batch_size=2, **ROWS)

    def trainer(folder: Path) -> Trainer:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **recipe.model_kwargs())
        rows = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1).tolist()]
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
        prepare_quantized(model)
        args = tiny.arguments(folder, max_steps=4, save_steps=2, save_strategy="steps", per_device_train_batch_size=2)
        return attach(Trainer(model, args, train_dataset=rows))

    whole = trainer(tmp_path / "whole")
    whole.train()
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    losses = [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (whole, again)]
    assert losses[0] == losses[1]
    assert tiny.largest_difference(again.model, whole.model) == 0.0


ROWS: dict[str, Any] = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
CHILD = """
import json, sys, threading, time, torch, transformers, bitsandbytes
from hf_memopt import ExpertsConfig
def anonymous(): return 1024 * int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
peak, before, stop = [0], anonymous(), []
def watch():
    while not stop:
        peak[0] = max(peak[0], anonymous()); time.sleep(0.002)
thread = threading.Thread(target=watch); thread.start()
config = ExpertsConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, quantization_config=config)
stop.append(1); thread.join()
print(json.dumps([peak[0] - before, sum(one.nbytes for one in (*model.parameters(), *model.buffers()))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_the_quantised_model_a_shard_and_an_expert(tmp_path: Path) -> None:
    """Of a checkpoint of 2 GB; its mapped pages are the page cache's."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12, **EIGHT}
    mixture("mixtral", torch.bfloat16, **sizes).save_pretrained(tmp_path, max_shard_size="300MB")
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) > 2e9
    found = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True)
    peak_bytes, model_bytes = json.loads(found.stdout.splitlines()[-1])
    print(f"peak {peak_bytes / 2**20:.0f} MiB, model {model_bytes / 2**20:.0f} MiB")
    assert peak_bytes < model_bytes + 300 * 2**20 + 3 * 1024 * 3584 * 2


def test_what_was_done_is_undone() -> None:
    model = mixture()
    names, before = {name for name, _ in model.named_parameters()}, model.config._experts_implementation
    handle = quantize_experts(model)
    assert not {*handle.names} & {name for name, _ in model.named_parameters()}
    copied = copy.deepcopy(model).half()
    assert copied.model.layers[0].mlp.experts.down_proj.absmax.dtype == torch.float32
    assert torch.equal(copied.model.layers[0].mlp.experts.down_proj[1], model.model.layers[0].mlp.experts.down_proj[1])
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    unsent = {*adapted._ddp_params_and_buffers_to_ignore}  # DDP sends the other buffers to all processes in each step
    assert not [name for name, _ in adapted.named_buffers() if ".experts." in name and name not in unsent]
    model = adapted.unload()
    handle.remove()
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert {name for name, _ in model.named_parameters()} == names
    assert model.config._experts_implementation == before
    assert "save_pretrained" not in vars(model)


def test_target_parameters_are_refused() -> None:
    """PEFT makes no adapter for a stack, and does not say so."""
    model = mixture()
    quantize_experts(model)
    both = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    with warnings.catch_warnings(action="ignore"):  # where nothing at all is matched
        adapted = peft.get_peft_model(model, peft.LoraConfig(**both))
    with pytest.raises(ValueError, match=r"target_parameters=\['mlp.experts.gate_up_proj'\] makes no adapter"):
        adapted(IDS)


def test_saving_the_whole_model_is_refused(tmp_path: Path) -> None:
    model = mixture()
    handle = quantize_experts(model)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="new random experts"):
            one.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    arguments = {"output_dir": str(tmp_path), "use_cpu": tiny.DEVICE == "cpu", "report_to": "none"}
    with pytest.raises(ValueError, match=r"has experts in 4 bits and no adapters, and save_strategy='steps'"):
        attach(Trainer(model, TrainingArguments(**arguments), train_dataset=tiny.rows(2))).train()
    attach(Trainer(add_adapters(copy.deepcopy(model), 2), TrainingArguments(**arguments)))
    handle.remove()
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).train()(IDS).logits, model.cpu()(IDS).logits)


def test_plans_put_experts_into_four_bits() -> None:
    config = AutoConfig.for_model("qwen3_moe", **{**SIZES, "hidden_size": 256, "vocab_size": 2000})
    found = plan(config, gpu="RTX 4060", method="qlora", effective_batch_size=4, seq_len=64)
    assert found.chosen is not None
    assert found.chosen.recipe.quantize_experts
    assert found.chosen.seconds is not None
    assert "bitsandbytes quantises linear layers" in found.chosen.recipe.reason_of("quantize_experts")
    script = found.script()
    assert script is not None
    assert "quantization = hf_memopt.ExpertsConfig(" in script
    assert "hf_memopt.add_adapters(model, 16, lora_alpha=32)" in script  # "all-linear" of PEFT would name the experts
    dense = plan(tiny.llama_config(), gpu="RTX 4060", method="qlora", effective_batch_size=4, seq_len=64)
    assert dense.chosen is not None
    assert not dense.chosen.recipe.quantize_experts
