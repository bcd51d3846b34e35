"""``estimate``: monotone, moved by every technique as far as it has to be, kind to the model it is given."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tables import refuses, tables
from transformers import T5Config

import tiny
from hf_memopt import Estimate, NotEstimableError, estimate, recipe
from hf_memopt.components import COMPONENTS, parts_of
from hf_memopt.gpus import find_gpu
from hf_memopt.techniques import freeze

TABLES = tables(__file__)

MIB = 2**20
# peft 0.21 asks a transformers 5.23 model for is_gradient_checkpointing, which that version renamed.
peft_reads_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate without a GPU also where there is one."""
    monkeypatch.setattr("hf_memopt.prediction.memory.estimation.current_gpu", lambda: None)


def bert_config(**changed: Any) -> transformers.BertConfig:
    """Return a BERT whose activations outweigh its weights, with dropout; 1.3 million parameters."""
    sizes = {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return tiny.bert_config(**{**sizes, **dropout, **changed})


def of_bert(**changed: Any) -> Estimate:
    """Return the estimate of a step of ``bert_config()``, 16 rows of 64 tokens."""
    return checked(estimate(bert_config(), **{"batch_size": 16, "seq_len": 64, **changed}))


def checked(found: Estimate) -> Estimate:
    """Return an estimate after checking what holds for all of them."""
    totals = found.timeline.components.sum(axis=1)
    assert list(found.components) == list(COMPONENTS)
    assert found.peak_allocated_bytes == totals.max()
    reserved = found.timeline.reserved
    assert found.peak_reserved_bytes >= reserved.max() >= found.peak_allocated_bytes
    decides = int(np.where(reserved * 100 >= reserved.max() * 99, totals, -1).argmax())  # the fullest of these
    at_peak = found.timeline.components[decides].tolist()
    assert found.components == dict(zip(COMPONENTS, at_peak, strict=True)) == found.timeline.parts_at(decides)
    assert found.phase == [name for first, name in found.timeline.phases if first <= decides][-1]
    assert sum(parts_of(found.components, found.peak_reserved_bytes, found.context_bytes).values()) == found.total_bytes
    for peak in found.phases.values():
        assert sum(peak.components.values()) == peak.allocated_bytes <= peak.reserved_bytes
    assert max(peak.allocated_bytes for peak in found.phases.values()) == found.peak_allocated_bytes
    assert found.total_bytes == found.peak_reserved_bytes + (found.context_bytes or 0)
    assert found.settings.precision != "auto"
    assert found.parameters >= found.trainable_parameters > 0
    assert found.flops > 0
    return found


def figure(found: Estimate, name: str) -> int:
    return found.components[name] if name in COMPONENTS else getattr(found, name)


@pytest.mark.parametrize("make", [tiny.bert_config, tiny.llama_config], ids=["bert", "llama"])
@settings(max_examples=4)
@given(
    batch_size=st.integers(1, 12),
    seq_len=st.integers(1, 48),
    layers=st.integers(1, 3),
    more=st.sampled_from(["batch_size", "seq_len", "layers"]),
    precision=st.sampled_from(["fp32", "bf16"]),
)
def test_more_never_takes_less(
    make: Any, batch_size: int, seq_len: int, layers: int, more: str, precision: str
) -> None:
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "layers": layers}
    larger = {**sizes, more: {"batch_size": 2 * batch_size, "seq_len": seq_len + 8, "layers": layers + 1}[more]}
    small, large = (
        checked(estimate(make(num_hidden_layers=size.pop("layers")), **size, precision=precision))
        for size in (sizes, larger)
    )
    assert large.peak_allocated_bytes >= small.peak_allocated_bytes
    assert large.flops > small.flops
    assert large.parameters >= small.parameters


SHARES = TABLES["shares"]
"""What is changed: figures as shares of those of the plain step, from and to."""


@pytest.mark.parametrize(("changed", "shares"), SHARES.values(), ids=SHARES)
def test_a_technique_moves_what_it_says(changed: dict[str, Any], shares: dict[str, tuple[float, float]]) -> None:
    plain, found = of_bert(precision="fp32"), of_bert(**{"precision": "fp32", **changed})
    for name, (least, most) in shares.items():
        assert least <= figure(found, name) / figure(plain, name) <= most, name


def test_micro_batches_are_those_of_a_known_loss() -> None:
    told = "micro-batches of a known loss; any other sees all rows, whose logits and gradients come on top"
    assert [told in of_bert(**changed).notes for changed in ({"micro_batch_size": 4}, {})] == [True, False]


def lora(model: Any, targets: Any = ("query", "value"), task: str = "SEQ_CLS") -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=list(targets), task_type=task))


def test_attention_that_keeps_its_matrix_costs_more_however_it_is_asked_for() -> None:
    eager, sdpa = (of_bert(attn_implementation=name) for name in ("eager", "sdpa"))
    matrix_bytes = 16 * 2 * 64 * 64 * 4
    assert eager.components["activations"] >= sdpa.components["activations"] + 4 * matrix_bytes
    flash, wide = (of_bert(attn_implementation=f"{name}", precision="bf16") for name in ("flash_attention_2", "eager"))
    assert flash.peak_allocated_bytes < wide.peak_allocated_bytes
    model = transformers.BertForSequenceClassification(bert_config())
    for name, same in (("eager", eager), ("sdpa", sdpa), ("eager", eager)):
        model.set_attn_implementation(name)
        for given_model in (bert_config(attn_implementation=name), model):
            found = estimate(given_model, batch_size=16, seq_len=64)
            assert found.peak_allocated_bytes == same.peak_allocated_bytes


def test_a_batch_of_one_row_has_no_padding() -> None:
    """Several rows have, and the answers of one question, and a batch that is cut into rows afterwards."""

    def mask_bytes(**settings: Any) -> int:
        own, full = (of_bert(precision="bf16", **settings, padding=padding) for padding in (None, False))
        return own.peak_allocated_bytes - full.peak_allocated_bytes

    assert mask_bytes(batch_size=1) == 0
    assert mask_bytes(batch_size=2) > 0
    assert mask_bytes(batch_size=2, micro_batch_size=1) > 0
    assert mask_bytes(batch_size=1, task="multiple-choice") > 0
    assert of_bert(padding=True).peak_allocated_bytes == of_bert().peak_allocated_bytes


def test_evaluation_gathers_logits() -> None:
    sizes = {"batch_size": 1, "seq_len": 16, "task": "masked-lm", "eval_batch_size": 8, "eval_batches": 6}
    config = bert_config(vocab_size=8000)
    ways: list[dict[str, Any]] = [
        *({}, {"eval_accumulation_steps": 2}, {"eval_do_concat_batches": False}, {"batch_eval_metrics": True}),
        *({"prediction_loss_only": True}, {"eval_batches": 1}),
    ]
    every, some, listed, by_batch, loss, one = (checked(estimate(config, **{**sizes, **way})) for way in ways)
    logits_bytes = 8 * 16 * (8000 * 4 + 8)  # and the labels
    assert every.phase == "evaluation"
    # the allocator adds up to 1 MiB to a block rather than cut it off
    assert 0 <= every.components["logits and loss"] - 2 * 6 * logits_bytes < 3 * MIB
    assert 0 <= some.components["logits and loss"] - 2 * 2 * logits_bytes < 3 * MIB
    assert 6 * logits_bytes <= listed.components["logits and loss"] < 9 * logits_bytes
    assert by_batch.peak_allocated_bytes == one.peak_allocated_bytes < listed.peak_allocated_bytes
    assert loss.peak_allocated_bytes < some.peak_allocated_bytes < every.peak_allocated_bytes
    assert "evaluation not included: give eval_batch_size" not in every.notes


@pytest.mark.parametrize(("positions", "length", "why"), [(600, 512, ""), (64, 64, ", all that the model takes")])
def test_the_default_length_is_said(positions: int, length: int, why: str) -> None:
    config = tiny.bert_config(max_position_embeddings=positions)
    found, given_length = estimate(config, batch_size=1), estimate(config, batch_size=1, seq_len=length)
    note = f"seq_len={length} by default{why}; pass the length of your longest rows"
    assert (found.seq_len, found.notes) == (length, (note, *given_length.notes))
    assert found.peak_reserved_bytes == given_length.peak_reserved_bytes


def state_of(model: Any) -> Any:
    """Return what a caller can see of a model."""
    return (
        [(name, id(one), one.requires_grad, one.grad) for name, one in model.named_parameters()],
        [(name, tensor.is_meta or tensor.clone().tolist()) for name, tensor in model.state_dict().items()],
        [(name, type(module), module.training) for name, module in model.named_modules()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        copy.deepcopy(model.config.to_dict()),
        model.config._attn_implementation,
        [getattr(module, "gradient_checkpointing", False) for module in model.modules()],
    )


def on_meta() -> Any:
    with torch.device("meta"):
        return transformers.BertForSequenceClassification(tiny.bert_config())


def evaluating() -> Any:
    model = tiny.bert().eval()
    model.bert.embeddings.requires_grad_(False)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    return model


@peft_reads_old_name
@pytest.mark.parametrize("make", [tiny.bert, on_meta, evaluating, lambda: lora(tiny.bert()), tiny.llama])
def test_the_model_is_not_touched(make: Any) -> None:
    model = make()
    before = state_of(model)
    sizes = {"batch_size": 2, "seq_len": 8, "eval_batch_size": 2}
    settings = {"checkpointing": True, "gradient_release": True, "max_grad_norm": 0.0, "attn_implementation": "eager"}
    found = estimate(model, **sizes, **settings, prepare=(lambda copied: freeze(copied, ["*embed*"]) and None,))
    assert state_of(model) == before
    assert checked(found).trainable_parameters < found.parameters == sum(p.numel() for p in model.parameters())


def asking_for(question: Any) -> torch.nn.Module:
    """Return a model whose head looks at the values of its output."""
    model = tiny.bert()
    model.classifier.register_forward_hook(lambda module, args, out: question(out) and None)
    return model


@pytest.mark.parametrize("question", [torch.Tensor.tolist, torch.unique], ids=["tolist", "unique"])
def test_code_that_needs_data_is_not_estimable(question: Any) -> None:
    with pytest.raises(RuntimeError) as cause:
        question(torch.empty(2, device="meta"))
    message = (
        "not estimable: BertForSequenceClassification does not run on the meta device, where tensors have shapes but "
        f"no values ({type(cause.value).__name__}: {str(cause.value).splitlines()[0]})"
    )
    refuses(NotEstimableError, message, estimate, asking_for(question), batch_size=2, seq_len=8)


def test_a_gpu_decides_precision_fit_and_context() -> None:
    of_gpus = {"T4": "fp16", "P100": "fp32", "GTX 1650": "fp32", "V100 16GB": "fp16", "RTX 3060 12GB": "bf16"}
    for name, precision in of_gpus.items():
        found = of_bert(gpu=name)
        assert (found.settings.precision, found.fits, found.gpu) == (precision, True, find_gpu(name))
        assert found.context_bytes == find_gpu(name).context_bytes
    assert of_bert(gpu="T4", precision="fp32").settings.precision == "fp32"
    released = {"gradient_release": True, "max_grad_norm": 0}  # which cannot be scaled
    assert of_bert(gpu="T4", **released).settings.precision == "fp32"


def test_float16_of_a_model_that_leaves_its_range_is_noted() -> None:
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0)
    note = (
        "t5 is unsafe in float16: its feed-forward outputs exceed 65,504 "
        "(https://github.com/huggingface/transformers/issues/5651); pass precision='fp32', as plan does"
    )
    found = [estimate(config, seq_len=8, gpu=gpu) for gpu in ("T4", "RTX 4090")]
    assert [(one.settings.precision, note in one.notes) for one in found] == [("fp16", True), ("bf16", False)]
    for model, gpu, native in (
        (config, "T4", "fp32"),
        (tiny.bert_config(), "T4", "fp16"),
        (tiny.bert_config(), "P100", "fp32"),
    ):
        note = f"bfloat16 is only emulated on {gpu}, which is slow; pass precision={native!r}"
        assert note in estimate(model, seq_len=8, gpu=gpu, bf16=True).notes


PADDED = "batches with padding: give padding=False where all rows have one length, which need no mask"


@pytest.mark.parametrize(
    ("settings", "is_noted"),
    [({}, True), ({"padding": False}, False), ({"padding": True}, False), ({"batch_size": 1}, False)],
)
def test_padding_that_is_assumed_is_noted(settings: dict[str, Any], is_noted: bool) -> None:
    """Rows of one length make a mask of ones alone, which transformers' code leaves out."""
    assert (PADDED in of_bert(**settings).notes) == is_noted
    assert of_bert(padding=False).peak_allocated_bytes < of_bert().peak_allocated_bytes


def test_what_is_assumed_of_a_gpu_is_in_the_notes() -> None:
    found = of_bert()
    assert (found.gpu, found.fits, found.context_bytes, found.settings.precision) == (None, None, None, "fp32")
    assert found.notes == (
        "no GPU given: kernels of compute capability 8.0, and the context is not in the total",
        "evaluation not included: give eval_batch_size",
        PADDED,
    )
    unknown = of_bert(gpu=dataclasses.replace(find_gpu("T4"), context_bytes=None), eval_batch_size=4)
    assert unknown.notes == ("the size of the CUDA context on T4 is unknown and not in the total", PADDED)
    assert unknown.total_bytes == unknown.peak_reserved_bytes
    for name in ("8GB", "MI300X"):
        (note,) = find_gpu(name).notes
        assert note in estimate(tiny.bert_config(), batch_size=2, seq_len=8, gpu=name).notes
    by_name = [{}, {"weights_dtype": "bfloat16"}, {"recipe": recipe("16gb-gpu")}, {"load_in": "nf4", "lora": 8}]
    for at, changed in enumerate(by_name):
        notes = estimate("gpt2", batch_size=1, seq_len=8, gpu="RTX 3060 12GB", **changed).notes
        assert any("counted with float32 weights" in note for note in notes) is (at == 0)


def gpu_of(usable_bytes: int) -> Any:
    return dataclasses.replace(find_gpu("T4"), usable_bytes=usable_bytes, context_bytes=0)


def test_a_gpu_that_is_too_small_does_not_fit_and_the_need_is_told() -> None:
    unlimited = of_bert(gpu="T4")
    found = of_bert(gpu=gpu_of(unlimited.peak_allocated_bytes - 1))
    assert found.fits is False
    assert found.peak_allocated_bytes == unlimited.peak_allocated_bytes
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= unlimited.peak_reserved_bytes


def test_a_gpu_on_which_the_allocator_must_give_back_fits_with_a_note() -> None:
    set_up = {"batch_size": 64, "attn_implementation": "eager"}
    unlimited = of_bert(gpu="T4", **set_up)
    for spare_bytes in range(2 * MIB, unlimited.peak_reserved_bytes - unlimited.peak_allocated_bytes, 2 * MIB):
        found = of_bert(gpu=gpu_of(unlimited.peak_reserved_bytes - spare_bytes), **set_up)
        if found.fits:
            break
    assert found.fits is True
    assert found.peak_reserved_bytes < unlimited.peak_reserved_bytes
    [note] = [note for note in found.notes if "returns unused blocks" in note]
    count = int(note.split("driver ")[1].split()[0])
    assert count > 0
    assert note == (
        f"it fits because the allocator returns unused blocks to the driver {count} time(s) in three steps, which "
        "costs time; PYTORCH_ALLOC_CONF=expandable_segments:True may avoid it"
    )


def test_a_recipe_and_its_overrides() -> None:
    small = recipe("4gb-gpu")
    found = checked(estimate(tiny.bert_config(), batch_size=2, seq_len=8, recipe=small, gpu="T4"))
    assert found.settings == small.step_settings().replace(precision="fp16")
    other = estimate(tiny.bert_config(), batch_size=2, seq_len=8, recipe=small, gpu="T4", optim="sgd", precision="fp32")
    assert other.settings == small.step_settings().replace(precision="fp32", optim="sgd")
