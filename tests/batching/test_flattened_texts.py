"""Batches without padding by stock's DataCollatorWithFlattening: the weights of padded training, the token budget, and
a refusal wherever texts would see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from datasets import Dataset
from slow_cases import slow_except
from tables import refuses, whole
from test_packed_rows import tiny_model
from transformers import DataCollatorWithFlattening, Trainer

import tiny
from hf_memopt import BucketedCollator, MicrobatchCallback, attach, bucketed, sorted_by_length
from hf_memopt.types import Change, LengthBuckets

COUNT, MAX_TOKENS = 36, 64
LENGTHS = [(7 * i) % 23 + 2 for i in range(COUNT)]

APART = ("llama", "gpt2", "mistral", "gemma3_text", "mixtral", "gpt_neox", "phi", "qwen3")  # by stock's masks
PACKED = ("opt", "biogpt")  # leak in stock, and are kept apart by the registered attention
LEAKING = ("bloom", "lfm2", "mamba", "jamba")
ALONG = ("lfm2", "mamba", "jamba")  # by recurrence or convolution
FAMILIES = slow_except(("llama", "gpt2", "opt", "bloom", "lfm2"), (*APART, *PACKED, *LEAKING))


def examples() -> list[dict[str, Any]]:
    """Return texts of different lengths with the labels of a causal LM; the second token, 5 + index, names the text."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 100, (length,), generator=generator).tolist() for length in LENGTHS]
    texts = [[text[0], 5 + i, *text[2:]] for i, text in enumerate(texts)]
    return [{"input_ids": text, "labels": [-100, *text[1:]]} for text in texts]


def flattening(**settings: Any) -> BucketedCollator:
    return BucketedCollator(inner=DataCollatorWithFlattening(**settings))


def make_trainer(
    folder: Any, model: Any, dataset: Any, collator: Any = None, *callbacks: Any, loss: Any = None, **settings: Any
) -> tuple[Trainer, list[torch.Tensor]]:
    """Return a Trainer and the list that its training steps fill with their ids."""
    seen: list[torch.Tensor] = []
    args = tiny.arguments(folder, **{"per_device_train_batch_size": 1, **settings})

    def see(module: Any, _: Any, kwargs: Any, output: Any) -> None:
        if module.training and output.logits.shape[-1] == 100:  # not in the look at the first batch, without a head
            seen.append(kwargs["input_ids"])

    model.register_forward_hook(see, with_kwargs=True)
    collator = flattening() if collator is None else collator
    given = {"data_collator": collator, "callbacks": list(callbacks), "compute_loss_func": loss}
    return Trainer(model, args, train_dataset=dataset, **given), seen


def refusal(folder: Path, model: Any, **settings: Any) -> str:
    """Return the message with which attach refuses a model."""
    with pytest.raises(ValueError) as error:
        attach(make_trainer(folder, model, examples(), flattening(**settings))[0])
    start = "inner=DataCollatorWithFlattening joins the texts of a batch into one row, "
    assert str(error.value).startswith(start)
    return str(error.value).removeprefix(start)


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), pytest.param("mistral", "sdpa", marks=pytest.mark.slow)],
)
def test_a_step_is_that_of_padded_training(name, attention, tmp_path):
    """One optimizer step over all texts, in packed rows and in padded batches: 1e-12 is rounding in another order.

    Not with Llama's eager attention or Gemma 3, which round to float32 inside.
    """
    weights, before = [], []
    for way in ("flattened", "padded"):
        model = tiny_model(name).double()
        model.set_attn_implementation(attention)
        before.append(torch.cat([p.detach().clone().flatten() for p in model.parameters()]))
        if way == "flattened":
            view, collator, per_device = bucketed(examples(), max_tokens=MAX_TOKENS), flattening(), 1
        else:
            view, collator, per_device = bucketed(examples(), batch_size=6), BucketedCollator(tiny.tokenizer()), 6
        settings = {
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": COUNT,
        }  # one step an epoch
        trainer, seen = make_trainer(tmp_path, model, view, collator, **settings)
        attach(trainer).train()
        assert trainer.state.global_step == 1
        assert {len(ids) for ids in seen} == {per_device}
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*before)
    assert (weights[0] - before[0]).abs().max() > 1e-4
    assert (weights[0] - weights[1]).norm() / (weights[0] - before[0]).norm() <= 1e-12


@pytest.mark.parametrize("name", FAMILIES)
def test_attach_refuses_exactly_the_models_whose_texts_see_each_other(name, tmp_path):
    """The slow reference: one text is changed, and the loss of another one in its row is looked at."""
    model = tiny_model(name)
    trainer, _ = make_trainer(tmp_path, model, examples())
    losses = []
    for changed in (range(10, 17), range(30, 37)):
        row = DataCollatorWithFlattening()([{"input_ids": list(changed)}, {"input_ids": list(range(50, 56))}])
        row["labels"][:, :7] = -100
        model.config.output_router_logits = False
        with torch.no_grad():
            losses.append(float(model.eval()(**row).loss))
    model.config.output_router_logits = name == "mixtral"  # whose loss is over all tokens of a batch
    is_leaking = losses[0] != losses[1]
    assert is_leaking == (name in (*PACKED, *LEAKING))
    attention = model.config._attn_implementation
    if name not in LEAKING:
        assert attach(trainer) is trainer
        assert model.config._attn_implementation == (f"packed_{attention}" if is_leaking else attention)
        trainer.memopt_handle.remove()
        assert model.config._attn_implementation == attention
        return
    seen = f"where those of {type(model).__name__} see each other (attention: {attention!r})"
    if name in ALONG:
        seen += ", by convolutions or state-space layers along the row"
    assert refusal(tmp_path, model) == (
        f"{seen}; expected a model whose layers keep apart what position_ids count anew. "
        "Train on padded rows: bucketed(dataset, batch_size=...) and BucketedCollator(tokenizer, causal_lm=True)"
    )


TAGGER, CLASSES = tiny.llama_config(num_labels=100), tiny.llama_config(num_labels=3)
NO_CLASS = "which LlamaForSequenceClassification could not be trained on (ValueError: "
NO_MODEL = "which Linear could not be trained on (AttributeError: "
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no positions": (tiny.llama, {"return_position_ids": False}, whole("where those of LlamaForCausalLM")),
    "other positions": (lambda: tiny_model("gpt2"), {"position_ids_start": 5}, whole("where GPT2LMHeadModel")),
    "labels of first tokens": (tiny.llama, {"separator_id": 7}, whole("with labels [7, 7,")),
    "first tokens": (lambda: transformers.LlamaForTokenClassification(TAGGER), {}, whole("and leaves out the")),
    "a class for a row": (lambda: transformers.LlamaForSequenceClassification(CLASSES), {}, NO_CLASS),
    "no model": (lambda: torch.nn.Linear(2, 2), {}, NO_MODEL),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_no_texts_apart_is_refused_with_the_reason(name, tmp_path):
    build, settings, message = REFUSED[name]
    if not settings.keys() <= set(DataCollatorWithFlattening.__init__.__code__.co_varnames):
        pytest.skip("this version of transformers counts from 0 only")
    torch.manual_seed(0)
    found = refusal(tmp_path, build(), **settings)
    if not message.endswith("Error: "):
        assert found == message
        return
    assert found.startswith(message)  # the rest is what the model raised
    assert (
        "; expected a model with a label for each token that takes position_ids. Train on padded rows: bucketed("
        in found
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_looked_into_and_flash_attentions_arguments_are_taken(tmp_path):
    lora = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.llama(), lora)
    view = bucketed(examples(), max_tokens=MAX_TOKENS)
    collator = flattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    trainer, seen = make_trainer(tmp_path, model, view, collator)
    attach(trainer).train()
    assert len(seen) == len(view)


def test_sharded_weights_are_not_checked_but_told(tmp_path):
    trainer, _ = make_trainer(tmp_path, tiny.llama(), examples())
    trainer.is_fsdp_enabled = True
    with pytest.warns(UserWarning, match="weights are sharded") as warned:
        trainer.data_collator.bind_trainer(trainer)
    assert [str(warning.message) for warning in warned] == [whole("attach could not check")]


def texts_of(ids: torch.Tensor, lengths: dict[int, int]) -> list[int]:
    """Return the texts in a row, whose second tokens name them."""
    found, position = [], 0
    while position < ids.shape[1]:
        found.append(int(ids[0, position + 1]) - 5)
        position += lengths[found[-1]]
    return found


@pytest.mark.parametrize("source", [list, Dataset.from_list], ids=["rows", "datasets"])
def test_an_attached_view_packs_rows_up_to_the_budget(source, tmp_path):
    view = bucketed(source(examples()), max_tokens=MAX_TOKENS)
    trainer, seen = make_trainer(tmp_path, tiny.llama(), view, num_train_epochs=2)
    padded = len(view)
    attach(attach(trainer)).train()
    assert not isinstance(view.buckets, LengthBuckets)
    assert len(view) < padded
    assert len(seen) == 2 * len(view)
    assert {len(ids) for ids in seen} == {1}
    assert max(ids.shape[1] for ids in seen) <= MAX_TOKENS
    lengths = dict(enumerate(LENGTHS))
    for epoch in range(2):
        rows = seen[epoch * len(view) : (epoch + 1) * len(view)]
        assert sorted(i for ids in rows for i in texts_of(ids, lengths)) == list(range(COUNT))
        assert rows[0].shape[1] == max(ids.shape[1] for ids in rows)
    reason = "a batch without padding costs its tokens, so texts of all lengths share one"
    change = Change("what max_tokens limits", "rows x longest row", "sum of lengths", reason)
    assert trainer.memopt_changes.count(change) == 1
    trainer.memopt_handle.remove()
    assert isinstance(view.buckets, LengthBuckets)
    assert len(view) == padded


REFUSED_VIEWS: list[tuple[dict[str, Any], Any, dict[str, Any], str]] = [
    ({"seed": 3}, flattening(), {"data_seed": 4}, whole("seed=3 of the bucketed")),
    ({"boundaries": [12, 32]}, flattening(), {}, whole("boundaries=[12, 32]")),
    ({}, DataCollatorWithFlattening(), {}, whole("data_collator=<DataCollatorWithFlattening>")),
    ({}, list, {}, whole("data_collator=<type>")),
]


@pytest.mark.parametrize(("of_view", "collator", "settings", "message"), REFUSED_VIEWS, ids=range(len(REFUSED_VIEWS)))
def test_attach_refuses_what_cannot_be_flattened(of_view, collator, settings, message, tmp_path):
    view = bucketed(examples(), max_tokens=MAX_TOKENS, **of_view)
    refuses(ValueError, message, attach, make_trainer(tmp_path, tiny.llama(), view, collator, **settings)[0])
    assert isinstance(view.buckets, LengthBuckets)  # as it was


def test_micro_batches_are_refused_at_the_first_step(tmp_path):
    view = bucketed(examples(), max_tokens=MAX_TOKENS)
    trainer = attach(make_trainer(tmp_path, tiny.llama(), view)[0], MicrobatchCallback(max_tokens=32))
    refuses(ValueError, whole("model=LlamaForCausalLM"), trainer.train)


def test_several_processes_cannot_evaluate_sorted_texts_without_padding(tmp_path, monkeypatch):
    trainer, _ = make_trainer(tmp_path, tiny.llama(), examples())
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    refuses(ValueError, whole("data_collator joins"), sorted_by_length(examples()).check_evaluation, trainer)
