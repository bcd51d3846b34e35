"""Gradients of unequal micro-batches in the stock Trainer against one big batch, for each kind of head."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import heads
import peft
import pytest
import torch
import transformers
from slow_cases import slow_except
from tables import refuses, table, whole
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt import Change, exact_loss
from two_ranks import run_pair

pytestmark = [
    # peft 0.21 asks a transformers 5.23 model for is_gradient_checkpointing, which that version renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # DeBERTa of transformers 5.8 and 5.17 on torch 2.13.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

ROWS = (5, 2, 1, 4, 3, 2)  # of the six micro-batches of a step: three on each of two processes
LONGEST = (7, 12, 3, 9, 5, 11)
PAD = 0
# float32 adds up the same terms in another order; float64 does too, and some heads take a norm or a softmax in float32.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


def micro_batches(kind: str) -> list[dict[str, torch.Tensor]]:
    """Return six micro-batches of unequal rows, each padded to its own longest row, with labels of a kind."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for rows, longest in zip(ROWS, LONGEST, strict=True):
        lengths = torch.randint(2, longest + 1, (rows,), generator=generator)
        lengths[0] = longest
        real = torch.arange(longest) < lengths[:, None]
        ids = torch.randint(5, 100, (rows, longest), generator=generator).where(real, PAD)
        batch = {"input_ids": ids, "attention_mask": real.long()}
        batch["labels"] = make_labels(kind, ids, real, generator)
        if kind == "image":
            batch = {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator), "labels": batch["labels"]}
        if kind == "seq2seq with inputs":
            batch["decoder_input_ids"] = batch["labels"].clamp(min=0).roll(1, dims=1)
            batch["decoder_input_ids"][:, 0] = PAD
        batches.append(batch)
    return batches


def make_labels(kind: str, ids: torch.Tensor, real: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return labels of a kind for ids (batch, seq), of which ``real`` are no padding."""
    rows, longest = ids.shape
    if kind in ("class", "image", "class, some ignored"):
        labels = torch.randint(3, (rows,), generator=generator)
        return labels.where(torch.arange(rows) % 2 == 1, -100) if "ignored" in kind else labels
    if kind == "several classes":
        return torch.randint(2, (rows, 3), generator=generator).float()
    if kind in ("number", "numbers"):
        return torch.randn((rows,) if kind == "number" else (rows, 3), generator=generator)
    if kind == "token":
        return (ids % 3).where(real & (ids % 4 > 0), -100)
    if kind == "masked":
        return ids.where(real & (torch.rand(ids.shape, generator=generator) < 0.3), -100)
    if kind == "causal":
        return ids.where(real, -100)
    return ids.flip(1)[:, : max(2, longest // 2)].where(real[:, : max(2, longest // 2)], -100)  # seq2seq


def join(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return one batch of all rows, padded to the longest of all."""
    joined = {}
    for name in batches[0]:
        tensors = [batch[name] for batch in batches]
        if tensors[0].dim() == 2 and tensors[0].dtype == torch.long:  # (batch, seq)
            width = max(tensor.shape[1] for tensor in tensors)
            value = -100 if name == "labels" else PAD
            tensors = [torch.nn.functional.pad(t, (0, width - t.shape[1]), value=value) for t in tensors]
        joined[name] = torch.cat(tensors)
    return joined


class Case(NamedTuple):
    """A head, the kind of its labels, and the label smoothing in the arguments."""

    build: Callable[[], torch.nn.Module]
    labels: str
    smoothing: float = 0.0


def lora(model: torch.nn.Module, task: str, *modules: str) -> torch.nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, target_modules=[*modules]))


def gpt2_lm() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(heads.HEADS["gpt2"].build().config)


def bert_tokens() -> torch.nn.Module:
    return transformers.BertForTokenClassification(tiny.bert_config())


def modernbert_mlm() -> torch.nn.Module:
    special = {**heads.SPECIAL, "cls_token_id": 2, "sep_token_id": 3, "max_position_embeddings": 64}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**heads.TINY, **special))


TAGGER = tiny.llama_config(num_labels=3, classifier_dropout=0.0)
CASES = {
    "bert": Case(tiny.bert, "class"),
    "bert, smoothed": Case(tiny.bert, "class", 0.1),
    "bert, rows without label": Case(tiny.bert, "class, some ignored"),
    "bert, multi-label": Case(tiny.bert, "several classes"),
    "bert, regression": Case(functools.partial(tiny.bert, num_labels=1), "number"),
    "bert, three targets": Case(functools.partial(tiny.bert, problem_type="regression"), "numbers"),
    **{name: Case(heads.HEADS[name].build, "class") for name in ("deberta-v2", "gpt2", "llama")},
    "vit": Case(heads.HEADS["vit"].build, "image"),
    "bert-tokens": Case(bert_tokens, "token"),
    "bert-tokens, smoothed": Case(bert_tokens, "token", 0.2),
    "llama-tokens": Case(
        lambda: transformers.LlamaForTokenClassification(tiny.llama_config(num_labels=3, classifier_dropout=0.0)),
        "token",
    ),
    "modernbert-mlm": Case(modernbert_mlm, "masked"),
    **{
        f"{name}{said}": Case(build, labels, smoothing)
        for name, build, labels in (
            ("bert-mlm", lambda: transformers.BertForMaskedLM(tiny.bert_config()), "masked"),
            ("gpt2-lm", gpt2_lm, "causal"),
            ("llama-lm", tiny.llama, "causal"),
            ("t5", heads.HEADS["t5"].build, "seq2seq"),
            ("bart", heads.HEADS["bart"].build, "seq2seq"),
        )
        for said, smoothing in (("", 0.0), (", smoothed", 0.1))
    },
    "bert, LoRA": Case(lambda: lora(tiny.bert(), "SEQ_CLS", "query"), "class"),
    "llama-lm, LoRA": Case(lambda: lora(tiny.llama(), "CAUSAL_LM", "q_proj", "v_proj"), "causal", 0.1),
    "bart, with decoder_input_ids": Case(heads.HEADS["bart"].build, "seq2seq with inputs"),
}
IN_TWO_PRECISIONS = ("bert, smoothed", "gpt2-lm", "t5, smoothed")


def loss_by_definition(logits: torch.Tensor, labels: torch.Tensor, kind: str, smoothing: float) -> torch.Tensor:
    """Return the mean over every label there is, each written out."""
    if kind in ("several classes", "number", "numbers"):
        terms = []
        for value, target in zip(logits.flatten(), labels.flatten().to(logits.dtype), strict=True):
            if kind == "several classes":
                probability = torch.sigmoid(value)
                terms.append(-(target * probability.log() + (1 - target) * (1 - probability).log()))
            else:
                terms.append((value - target) ** 2)
        return torch.stack(terms).mean()
    if kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    terms = []
    for scores, label in zip(logits.reshape(-1, logits.shape[-1]), labels.flatten().tolist(), strict=True):
        if label != -100:
            surprise = scores.logsumexp(0) - scores  # of each class
            terms.append((1 - smoothing) * surprise[label] + smoothing * surprise.mean())
    return torch.stack(terms).mean()


def seeded(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return case.build().to(dtype).train()


def cast(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if name == "pixel_values" else tensor for name, tensor in batch.items()}


def one_big_batch(case: Case, dtype: torch.dtype, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the gradient of the loss by definition over all rows at once, one long vector."""
    model = seeded(case, dtype)
    batch = cast(join(batches), dtype)
    outputs = model(**batch)  # with labels, from which T5 and BART make their own decoder inputs
    loss_by_definition(outputs.logits, batch["labels"], case.labels, case.smoothing).backward()
    return flat(parameter.grad for parameter in model.parameters())


def flat(gradients: Any) -> torch.Tensor:
    return torch.cat([gradient.flatten().double() for gradient in gradients if gradient is not None])


class Gradient(TrainerCallback):
    """Keep the gradient of the last step as one long vector."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Copy it."""
        self.found = flat(parameter.grad for parameter in model.parameters())


def make_trainer(case: Case, dtype: torch.dtype, output_dir: Any, **settings: Any) -> tuple[Trainer, Gradient]:
    """Return a stock Trainer whose first step takes the six micro-batches, and what will hold its gradient."""
    model, recorder = seeded(case, dtype), Gradient()
    batches = settings.pop("batches", None) or micro_batches(case.labels)
    settings |= {"gradient_accumulation_steps": len(batches) // int(os.environ.get("WORLD_SIZE", "1"))}
    settings |= {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", "max_steps": 1}
    settings |= {"label_smoothing_factor": case.smoothing, "remove_unused_columns": False}
    given = {"data_collator": lambda items: items[0], "callbacks": [recorder], "compute_loss_func": exact_loss(model)}
    data = [cast(batch, dtype) for batch in batches]
    return Trainer(model, tiny.arguments(output_dir, **settings), train_dataset=data, **given), recorder


def bind(trainer: Trainer, loss: Any = None) -> tuple[Change, ...]:
    """Bind the trainer's loss, or another one, and return what is recorded for it."""
    before = getattr(trainer, "memopt_changes", ())
    (loss or trainer.compute_loss_func).bind_trainer(trainer)
    return trainer.memopt_changes[len(before) :] if hasattr(trainer, "memopt_changes") else ()


def train_exactly(case: Case, dtype: torch.dtype, output_dir: Any, **settings: Any) -> float:
    """Train a step with exact_loss and return how far its gradient is from that of one big batch."""
    trainer, recorder = make_trainer(case, dtype, output_dir, **settings)
    bind(trainer)
    trainer.train()
    reference = one_big_batch(case, dtype, settings.get("batches") or micro_batches(case.labels))
    return float((recorder.found - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_except(
        [*((name, "float64") for name in CASES), *((name, "float32") for name in IN_TWO_PRECISIONS)],
        itertools.product(CASES, ("float64", "float32")),
    ),
)
def test_unequal_micro_batches_give_the_gradient_of_one_big_batch(name, precision, tmp_path):
    dtype = getattr(torch, precision)
    assert train_exactly(CASES[name], dtype, tmp_path) <= TOLERANCES[dtype]


def two_processes(output_dir: str) -> None:
    """Write what each of two processes finds: the errors of every case over what is allowed, and two more results."""
    gc.freeze()  # the Trainer collects garbage at the start of each run, 0.5 s with all that was imported
    errors = {}
    for name, case in CASES.items():
        for dtype in TOLERANCES if name in IN_TWO_PRECISIONS else [torch.float64]:
            error = train_exactly(case, dtype, output_dir, ddp_backend="gloo")
            errors[f"{name}, {str(dtype).removeprefix('torch.')}"] = error / TOLERANCES[dtype]
    wrapped = repr(exact_loss(DistributedDataParallel(tiny.bert())))
    trainer, _ = make_trainer(CASES["bert"], torch.float64, output_dir, average_tokens_across_devices=False)
    try:
        bind(trainer)
    except ValueError as error:
        refused = str(error)
    found = {"errors": errors, "wrapped": wrapped, "refused": refused}
    Path(output_dir, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


def test_two_processes_get_the_gradient_of_one_big_batch(tmp_path):
    for found in run_pair(tmp_path, __file__, str(tmp_path)):
        assert len(found["errors"]) == len(CASES) + len(IN_TWO_PRECISIONS)
        assert {name: error for name, error in found["errors"].items() if not error <= 1} == {}
        assert found["wrapped"] == (
            "exact_loss(BertForSequenceClassification, task='sequence-classification', label_smoothing=None)"
        )
        assert found["refused"] == whole("average_tokens_across_devices=False")


# What is counted


@pytest.mark.parametrize("name", ["bert", "bert, multi-label", "bert-tokens", "gpt2-lm", "llama-lm", "t5"])
def test_the_count_of_a_bound_trainer_is_what_the_head_predicts(name, tmp_path):
    case = CASES[name]
    trainer, _ = make_trainer(case, torch.float32, tmp_path)
    bind(trainer)
    batches = micro_batches(case.labels)
    before = [batch["labels"].clone() for batch in batches]
    # Private; pinned here for 5.8.1, 5.17.0 and 5.23.0.
    counted = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    predicted = [labels[:, 1:] if case.labels == "causal" else labels for labels in before]
    assert int(counted) == sum(int((labels != -100).sum()) for labels in predicted)
    assert all(torch.equal(batch["labels"], labels) for batch, labels in zip(batches, before, strict=True))
    assert trainer.get_batch_samples(iter(batches), 6, torch.device("cpu"))[1] == counted
    assert trainer._get_num_items_in_batch([], torch.device("cpu")) is None


def test_a_micro_batch_without_labels_adds_nothing(tmp_path):
    for name in ("bert", "gpt2-lm"):
        case = CASES[name]
        batches = micro_batches(case.labels)
        batches[1]["labels"] = torch.full_like(batches[1]["labels"], -100)
        assert train_exactly(case, torch.float64, tmp_path, batches=batches) <= 1e-12
        trainer, recorder = make_trainer(case, torch.float64, tmp_path, batches=batches[1:2])
        bind(trainer)
        trainer.train()
        assert torch.equal(recorder.found, torch.zeros_like(recorder.found))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.smoothing == 0])
def test_without_a_count_it_is_the_models_own_loss(name):
    case = CASES[name]
    model = seeded(case, torch.float32)
    batch = join(micro_batches(case.labels))
    own = model(**batch)
    loss = exact_loss(model)(type(own)(logits=own.logits), batch["labels"])
    torch.testing.assert_close(loss, own.loss)
    torch.testing.assert_close(exact_loss(model)((own.logits,), batch["labels"]), own.loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_summed_in_float32(dtype):
    loss = exact_loss(bert_tokens())
    logits = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.randint(3, (4, 9), generator=torch.Generator().manual_seed(0))
    found = loss({"logits": logits}, labels, num_items_in_batch=torch.tensor(40))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, loss({"logits": logits.float()}, labels, 40), rtol=0, atol=0)


FROM_ARGUMENTS = "the TrainingArguments' label_smoothing_factor, which stock ignores beside a compute_loss_func"
SMOOTHING = Change("exact_loss label_smoothing", 0.0, 0.1, FROM_ARGUMENTS)
FROM_NOTHING = "GPT2LMHeadModel predicts no token from nothing"
COUNTED = Change("num_items_in_batch", "labels", "labels without those of position 0", FROM_NOTHING)
FOR_BART = whole("BartForConditionalGeneration")
INPUTS = Change("decoder_input_ids", None, "made from the labels where missing", FOR_BART)
BOUND = {"bert": (), "bert, smoothed": (SMOOTHING,), "gpt2-lm, smoothed": (SMOOTHING, COUNTED), "bart": (INPUTS,)}


@pytest.mark.parametrize("name", BOUND)
def test_binding_tells_what_it_changed_and_only_once(name, tmp_path):
    trainer, _ = make_trainer(CASES[name], torch.float32, tmp_path)
    assert bind(trainer) == BOUND[name]
    methods = trainer._get_num_items_in_batch, trainer.compute_loss
    assert bind(trainer) == ()
    assert (trainer._get_num_items_in_batch, trainer.compute_loss) == methods


def test_label_smoothing_can_be_given_but_not_twice(tmp_path):
    model = tiny.bert()
    logits, labels = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, -100])
    loss = exact_loss(model, label_smoothing=0.3)
    torch.testing.assert_close(loss({"logits": logits}, labels), loss_by_definition(logits, labels, "class", 0.3))
    trainer, _ = make_trainer(CASES["bert, smoothed"], torch.float32, tmp_path)
    refuses(ValueError, whole("label_smoothing_factor=0.1"), loss.bind_trainer, trainer)
    assert bind(trainer, exact_loss(model, label_smoothing=0.1)) == ()


def test_a_second_trainer_brings_its_own_smoothing(tmp_path):
    loss = exact_loss(tiny.bert())
    for name, smoothing in (("bert, smoothed", 0.1), ("bert", 0.0)):
        trainer, _ = make_trainer(CASES[name], torch.float32, tmp_path)
        (change,) = bind(trainer, loss)
        assert change.new == smoothing


@pytest.mark.filterwarnings("ignore:Label smoothing is not compatible with multi-label")  # 5.23.0 tells it too
def test_several_labels_are_not_smoothed_as_in_stock(tmp_path):
    model = tiny.bert(problem_type="multi_label_classification")
    trainer, _ = make_trainer(Case(lambda: model, "several classes", 0.1), torch.float32, tmp_path)
    assert bind(trainer) == ()


@pytest.mark.parametrize("name", ["gpt2-lm", "llama-lm", "bart", "bart, with decoder_input_ids"])
def test_heads_that_need_the_trainer_refuse_to_train_without(name, tmp_path):
    trainer, recorder = make_trainer(CASES[name], torch.float32, tmp_path)
    other, _ = make_trainer(CASES[name], torch.float32, tmp_path)
    loss = trainer.compute_loss_func
    loss.bind_trainer(other)
    message = whole("exact_loss of {model_name}", model_name=loss.model_name, task=loss.task)
    refuses(RuntimeError, message, trainer.train)
    assert not hasattr(recorder, "found")


def test_it_pickles_without_the_weights():
    for name in ("bert", "gpt2-lm", "bart"):
        loss = exact_loss(CASES[name].build(), label_smoothing=0.1)
        twin = pickle.loads(pickle.dumps(loss))
        assert repr(twin) == repr(loss)
        assert len(pickle.dumps(loss)) < 10_000


class NewHead(transformers.BertForSequenceClassification):
    """A head with a forward, and maybe a loss, of its own."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Return what a user's head might."""
        return super().forward(input_ids=input_ids, labels=labels)


class SameHead(transformers.BertForSequenceClassification):
    """A head that only bears another name."""


def build(name: str, **settings: Any) -> torch.nn.Module:
    """Build a transformers head by name, without weights."""
    head = getattr(transformers, name)
    with torch.device("meta"):
        return head(head.config_class(**settings))


def test_a_subclass_without_a_forward_is_its_parent_and_another_can_be_named():
    assert exact_loss(SameHead(tiny.bert_config())).task == "sequence-classification"
    loss = exact_loss(NewHead(tiny.bert_config()), task="sequence-classification")
    assert repr(loss) == "exact_loss(NewHead, task='sequence-classification', label_smoothing=None)"
    loss = exact_loss(torch.nn.Linear(2, 3), task="token-classification")
    assert loss((torch.zeros(1, 2, 3),), torch.tensor([[1, -100]]), 2).item() == pytest.approx(math.log(3) / 2)


@pytest.mark.parametrize(("name", "task"), table("batching/tables/tasks_of_heads"))
def test_the_task_of_a_head(name, task):
    if task is not None:
        assert exact_loss(build(name)).task == task
        return
    with pytest.raises(ValueError, match=rf"^model=<{name}> has a loss that exact_loss does not know; expected a tra"):
        exact_loss(build(name))


AUXILIARY = (
    "{} gives {} an auxiliary loss, which is not a sum over labels; expected a model without. Leave compute_loss_func "
    "out and call attach(trainer), or set: model.config.{}"
)
LOGITS = torch.zeros(2, 4, 3)
TOKEN_LABELS = torch.zeros(2, 4, dtype=torch.long)
NOTHING_ELSE = (
    "expected logits and nothing else that adds to the loss. Leave compute_loss_func out and call attach(trainer)"
)
OWN_WAY = "Leave compute_loss_func out and call attach(trainer) if the model reads its labels in its own way."
MIXTRAL = ("output_router_logits=True", "MixtralForCausalLM", "output_router_logits = False")
BAMBA = ("z_loss_coefficient=0.5", "BambaForCausalLM", "z_loss_coefficient = 0.0")
REGRESSION = (
    "label_smoothing=0.1 has no meaning for regression; expected 0. Call: exact_loss(model, label_smoothing=0.0)"
)
NO_LOGITS = f"outputs=<dict> of BertForTokenClassification have no logits; {NOTHING_ELSE}"
AUX_LOSS = f"outputs=<dict> of LlamaForCausalLM have an auxiliary aux_loss; {NOTHING_ELSE}"


def of_number() -> Any:
    return exact_loss(tiny.bert(num_labels=1), label_smoothing=0.1)((torch.zeros(2, 1),), torch.zeros(2))


def loss_of(build: Callable[[], Any], outputs: Any, labels: Any) -> Callable[[], Any]:
    return lambda: exact_loss(build())({"logits": LOGITS, **outputs}, labels)


BAD_CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: exact_loss(NewHead(tiny.bert_config())), whole("model=<NewHead> has")),
    (lambda: exact_loss(build("MixtralForCausalLM", output_router_logits=True)), AUXILIARY.format(*MIXTRAL)),
    (lambda: exact_loss(build("BambaForCausalLM", z_loss_coefficient=0.5)), AUXILIARY.format(*BAMBA)),
    *[
        (lambda share=share: exact_loss(tiny.bert(), label_smoothing=share), whole("label_smoothing={", share=share))
        for share in (-0.1, 1, float("nan"))
    ],
    (lambda: exact_loss(tiny.bert(), task="causal"), whole("task='causal' is unknown;")),
    (of_number, REGRESSION),
    (loss_of(bert_tokens, {}, None), whole("labels=None reached")),
    (lambda: exact_loss(bert_tokens())({"scores": LOGITS}, TOKEN_LABELS), NO_LOGITS),
    (loss_of(tiny.llama, {"aux_loss": torch.tensor(1.0)}, TOKEN_LABELS), AUX_LOSS),
    (loss_of(CASES["bart"].build, {}, TOKEN_LABELS[:, :3]), whole("labels=<shape (2, 3)>", own_way=OWN_WAY)),
    (loss_of(tiny.bert, {"logits": LOGITS[:, 0]}, TOKEN_LABELS), whole("labels=<shape (2, 4)>", own_way=OWN_WAY)),
    (
        loss_of(CASES["deberta-v2"].build, {"logits": LOGITS[:, 0]}, torch.zeros(2, 3)),
        whole("problem_type=None makes"),
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_what_it_cannot_compute_is_refused(call, message):
    refuses(ValueError, message, call)


def test_several_gpus_in_one_process_and_a_decoder_without_inputs_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"^n_gpu=2 GPUs are visible to this one process"):
        exact_loss(tiny.bert())({"logits": LOGITS[:, 0]}, torch.tensor([0, 1]), torch.tensor([[2], [2]]))
    trainer, _ = make_trainer(CASES["bart"], torch.float32, tmp_path)
    bind(trainer)
    trainer.model.prepare_decoder_input_ids_from_labels = None
    refuses(ValueError, whole("decoder_input_ids are"), trainer.train)


if __name__ == "__main__":
    two_processes(sys.argv[1])
