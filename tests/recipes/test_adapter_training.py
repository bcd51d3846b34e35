"""Recipes for adapters train for real, on a CPU: full, LoRA, QLoRA and int8, saved, reloaded, merged and resumed."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import five_lines
import peft
import pytest
import torch
import transformers
from datasets import Dataset
from slow_cases import slow_except
from transformers import AutoModelForCausalLM

import tiny
from hf_memopt import Recipe, SpeechCollator, add_adapters, prepare_quantized

pytestmark = [
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
    # peft 0.21 asks transformers 5.23 under the names of 5.17, here where the Trainer switches checkpointing on
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LEAST_MEMORY = {"fused_cross_entropy": True, "checkpointing": True, "optim": "paged_adamw_8bit"}
SMALL = Recipe("small", "a test", effective_batch_size=8, per_device_train_batch_size=4, memory_report=False)
RECIPES = {
    "full": SMALL,
    "full, bfloat16": SMALL.replace(weights_dtype="bfloat16"),
    "full, released": SMALL.replace(gradient_release=True, optim="adamw_torch"),
    "full, least memory": SMALL.replace(
        **LEAST_MEMORY,
        sparse_tied_embedding=True,
        gradient_release=True,
        weights_dtype="bfloat16",
        rounding="stochastic",
    ),
    "LoRA": SMALL.replace(lora=4, weights_dtype="bfloat16"),
    "LoRA, two targets": SMALL.replace(lora=4, lora_targets=("q_proj", "v_proj")),
    "int8": SMALL.replace(lora=4, load_in="int8"),
    "QLoRA": SMALL.replace(**LEAST_MEMORY, lora=4, load_in="nf4"),
    "QLoRA, float32": SMALL.replace(**LEAST_MEMORY, lora=4, load_in="nf4", precision="fp32"),
}
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # bitsandbytes quantises blocks of 64
QUICK = ("QLoRA",)
EVERY = slow_except(QUICK, RECIPES)

ON_CPU = tiny.DEVICE == "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Llama, saved in bfloat16 as models are published."""
    path = tmp_path_factory.mktemp("llama")
    tiny.llama(**SIZES, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(path)
    return path


def texts(count: int = 32) -> Dataset:
    """Return rows of tokens without labels."""
    return Dataset.from_list([{"input_ids": [5 + (i * j) % 90 for j in range(6 + 5 * i % 11)]} for i in range(count)])


def trainer_of(recipe: Recipe, folder: Path, output_dir: Path, **given: Any) -> transformers.Trainer:
    arguments = {
        "output_dir": str(output_dir), "use_cpu": ON_CPU, "report_to": "none", "disable_tqdm": True, "max_steps": 4,
        "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, **recipe.model_kwargs())
    return five_lines.trainer_of(
        recipe,
        model=model,
        train_dataset=texts(),
        processing_class=tiny.tokenizer(),
        causal_lm=True,
        training_arguments={**arguments, **given.pop("training_arguments", {})},
        **given,
    )


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=torch.arange(5, 17)[None]).logits.float()


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_trains_saves_reloads_and_resumes(name: str, folder: Path, tmp_path: Path) -> None:
    chosen = RECIPES[name]
    trainer = trainer_of(chosen, folder, tmp_path, eval_dataset=texts())
    untrained, before = trainer.evaluate()["eval_loss"], trained_weights(trainer.model)
    if chosen.lora is not None:
        assert {weight.dtype for weight in before.values()} == {torch.float32}
        assert all("lora_" in name for name in before)
    trainer.train()
    after = trained_weights(trainer.model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert trainer.evaluate()["eval_loss"] < untrained
    resumed = trainer_of(chosen, folder, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    if chosen.precision == "fp32":  # the values are bfloat16's, as published, and may be stored in 16 bits again
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32, torch.uint8}
    again = trained_weights(resumed.model)
    assert all(torch.equal(after[name], again[name]) for name in after)


@pytest.mark.parametrize("name", EVERY)
def test_what_a_recipe_trained_is_reloaded_and_merged(name: str, folder: Path, tmp_path: Path) -> None:
    chosen = RECIPES[name].replace(precision="fp32")  # without autocast: a saved model computes as in training
    trainer = trainer_of(chosen, folder, tmp_path, training_arguments={"save_strategy": "no"})
    trainer.train()
    trainer.save_model(str(tmp_path / "last"))
    expected, keywords = logits(trainer.model), chosen.model_kwargs()
    if chosen.lora is None:
        reloaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "last", **keywords)
        assert torch.equal(logits(reloaded), expected)
        return
    base = AutoModelForCausalLM.from_pretrained(folder, **keywords)
    reloaded = peft.PeftModel.from_pretrained(base, tmp_path / "last")
    if chosen.load_in is not None:
        prepare_quantized(reloaded)  # without bitsandbytes' kernel for inference on a CPU, which rounds otherwise
    scale = expected.abs().max()
    assert torch.equal(logits(reloaded), expected)
    with warnings.catch_warnings(action="ignore"):  # merging rounds the weights anew
        merged = reloaded.merge_and_unload()
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    # the merged weight is rounded to the base's dtype: 8 bits of a bfloat16, or anew to 8 or 4 bits
    assert (logits(merged) - expected).abs().max() <= {"nf4": 0.3, "int8": 0.1}.get(chosen.load_in, 0.02) * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_best_checkpoint_is_loaded_at_the_end(name: str, folder: Path, tmp_path: Path) -> None:
    arguments = {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 6, "learning_rate": 0.1,
        "metric_for_best_model": "loss",
    }  # fmt: skip
    trainer = trainer_of(RECIPES[name], folder, tmp_path, training_arguments=arguments, eval_dataset=texts(8))
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert best.name == f"checkpoint-{min(losses, key=losses.get)}"
    assert trainer.evaluate()["eval_loss"] == min(losses.values())


# ---- Other models ---------------------------------------------------------------------------------------------------


def whisper() -> transformers.WhisperForConditionalGeneration:
    sizes = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(vocab_size=100, **sizes, **tokens))


def sounds() -> list[dict[str, Any]]:
    """Return features of one size with labels of several lengths, as Whisper's tokenizer makes them: start first."""
    generator = torch.Generator().manual_seed(0)
    labels = [[3, *(5 + (i * j) % 50 for j in range(1 + i % 7)), 2] for i in range(16)]
    return [{"input_features": torch.randn(8, 32, generator=generator), "labels": row} for row in labels]


SET_UPS = {"full": SMALL, "LoRA": RECIPES["LoRA"], "LoRA, checkpointed": RECIPES["LoRA"].replace(checkpointing=True)}


@pytest.mark.parametrize("set_up", slow_except(("LoRA",), SET_UPS))
def test_a_model_of_sound_trains_without_a_tokenizer(set_up: str, tmp_path: Path) -> None:
    chosen = SET_UPS[set_up]
    torch.manual_seed(0)
    model = whisper().to(chosen.model_kwargs()["dtype"])
    trainer = five_lines.trainer_of(
        chosen.replace(bucketing=False),
        model=model,
        train_dataset=sounds(),
        eval_dataset=sounds(),
        data_collator=SpeechCollator(model.config.decoder_start_token_id, model.dtype),
        training_arguments={
            "output_dir": str(tmp_path), "use_cpu": ON_CPU, "report_to": "none", "disable_tqdm": True, "max_steps": 2,
            "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2,
        },
    )  # fmt: skip
    before = trained_weights(trainer.model)
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    trainer.train()
    after = trained_weights(trainer.model)
    assert not any(torch.equal(before[name], after[name]) for name in before if "lora_A" not in name)
    assert 0 < trainer.evaluate()["eval_loss"] < 10


def test_labels_of_sound_are_padded_and_lose_the_token_that_the_model_adds() -> None:
    collator, rows = SpeechCollator(decoder_start_token_id=3, dtype=torch.bfloat16), sounds()[:3]
    batch = collator(rows)
    assert batch["labels"].tolist() == [[5, 2, -100, -100], [5, 6, 2, -100], [5, 7, 9, 2]]
    assert (batch["input_features"].shape, batch["input_features"].dtype) == ((3, 8, 32), torch.bfloat16)
    assert SpeechCollator(decoder_start_token_id=4)(rows)["labels"][0].tolist() == [3, 5, 2, -100, -100]
    assert list(collator([{"input_features": row["input_features"]} for row in rows])) == ["input_features"]
    assert pickle.loads(pickle.dumps(collator)) == collator


def segformer() -> transformers.SegformerForSemanticSegmentation:
    sizes = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_attention_heads": [1, 1], "decoder_hidden_size": 16}
    return transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(num_encoder_blocks=2, **sizes))


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (tiny.bert, {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([1])}),
        # a list of pictures, and running statistics
        (segformer, {"pixel_values": torch.ones(2, 3, 32, 32), "labels": torch.zeros(2, 32, 32, dtype=torch.int64)}),
    ],
)
def test_a_head_trained_whole_computes_beside_16_bits_without_autocast(build: Any, batch: dict[str, Any]) -> None:
    batch = {key: one.bfloat16() if one.is_floating_point() else one for key, one in batch.items()}
    adapted: Any = pickle.loads(pickle.dumps(copy.deepcopy(add_adapters(build().bfloat16(), 4))))
    head = next(iter(adapted.peft_config["default"].modules_to_save))
    whole = [one for name, one in adapted.named_parameters() if f"{head}.modules_to_save" in name]
    assert {one.dtype for one in whole} == {torch.float32}
    adapted(**batch).loss.backward()
    assert all(one.grad is not None and one.grad.any() for one in whole)
    merged = adapted.merge_and_unload().eval()
    expected = merged(**batch).logits
    given: list[torch.dtype] = []
    linear = next(one for one in merged.get_submodule(head).modules() if isinstance(one, torch.nn.Linear))
    linear.register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = merged(**batch).logits
    assert given == [torch.bfloat16]  # as in stock
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.01)  # 8 bits of bfloat16


@pytest.mark.slow
def test_a_model_that_is_built_later_gets_adapters(folder: Path, tmp_path: Path) -> None:
    chosen = RECIPES["LoRA"]
    load = AutoModelForCausalLM.from_pretrained
    trainer = five_lines.trainer_of(
        chosen,
        model_init=lambda: chosen.prepare_model(load(folder, **chosen.model_kwargs())),
        train_dataset=texts().map(lambda row: {"labels": row["input_ids"]}),
        processing_class=tiny.tokenizer(),
        training_arguments={
            "output_dir": str(tmp_path), "use_cpu": ON_CPU, "report_to": "none", "disable_tqdm": True, "max_steps": 1,
            "save_strategy": "no",
        },
    )  # fmt: skip
    trainer.train()
    assert isinstance(trainer.model, peft.PeftModel)
