"""A fused model: what is read of it, backward passes, adapters, copies, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tables import refuses, whole
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import BertForMaskedLM

import tiny
from hf_memopt.techniques import fuse_cross_entropy
from language_models import distance, gradients

VOCABULARY = 100
IDS = torch.randint(5, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
FLAT = IDS.view(-1)


def llama(**settings: Any) -> Any:
    return tiny.llama(**settings).double().train()


def test_logits_read_after_the_loss_are_real_and_have_gradients() -> None:
    model = llama()
    handle = fuse_cross_entropy(model)
    output = model(input_ids=IDS, labels=IDS)
    expected = copy.deepcopy(model)(input_ids=IDS).logits  # a copy is stock
    assert torch.equal(output.logits.detach(), expected.detach())
    assert output.logits.grad_fn is not None
    assert handle.record.fused == 1


def test_logits_of_weights_that_are_gone_are_refused() -> None:
    model = llama()
    fuse_cross_entropy(model)
    output = model(input_ids=IDS, labels=IDS)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    refuses(RuntimeError, whole("logits of shape (2,"), output.logits.argmax, -1)


def test_evaluation_and_no_gradients_give_plain_logits() -> None:
    model = llama()
    handle = fuse_cross_entropy(model)
    with torch.no_grad():
        assert type(model(IDS).logits) is torch.Tensor
    assert type(model.eval()(IDS).logits) is torch.Tensor
    assert type(model.train().requires_grad_(False)(IDS).logits) is torch.Tensor
    assert not handle.record.changes()


@pytest.mark.parametrize("precision", ["", "autocast", "frozen head"])
def test_a_graph_that_is_retained_gives_the_same_gradients_again(precision: str) -> None:
    """16 bits make their gradients in the backward pass, the others before, and a frozen head in bfloat16."""
    model = tiny.llama().train()
    fuse_cross_entropy(model)
    if precision == "frozen head":
        model.lm_head.requires_grad_(False)
    with torch.autocast("cpu", torch.float16 if precision == "autocast" else torch.bfloat16, enabled=bool(precision)):
        loss = model(input_ids=IDS, labels=IDS).loss * 3
    found = []
    for retain in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.requires_grad])
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))


def test_a_second_backward_without_retaining_is_refused() -> None:
    model = llama()
    fuse_cross_entropy(model)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    refuses(RuntimeError, whole("loss.backward() was"), loss.backward)


def test_the_private_names_of_torch() -> None:
    """Seen in torch 2.6 to 2.13."""
    assert torch._C._autograd._get_current_graph_task_keep_graph() is True  # outside of a backward pass
    with torch._C.DisableTorchFunction():
        pass
    assert callable(torch._C._disabled_torch_function_impl)
    assert tree_leaves(tree_map_only(int, str, ({"a": [1, (2.0, None)]},))) == ["1", 2.0, None]


@pytest.mark.parametrize("part", ["head", "all but the head"])
def test_what_is_frozen_gets_no_gradient(part: str) -> None:
    def frozen(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(("lm_head" in name) == (part != "head"))
        return model

    model = frozen(llama())
    expected = gradients(model(input_ids=IDS, labels=IDS).loss, model)
    handle = fuse_cross_entropy(model)
    found = gradients(model(input_ids=IDS, labels=IDS).loss, model)
    assert handle.record.fused == 1
    assert distance(found, expected) <= 1e-6  # stock rounds the logits to float32


# peft 0.21 asks a transformers 5.23 model for is_gradient_checkpointing, which that version renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("before", [True, False], ids=["fused before PEFT", "fused after PEFT"])
@pytest.mark.parametrize("when", ["LoRA on the head", "head in modules_to_save", "LoRA and a bias"])
def test_adapters_on_the_head(when: str, before: bool) -> None:
    """What is added to the logits needs them, and is stock's bit for bit; a head that is trained whole is fused."""
    settings = {"modules_to_save": ["lm_head"]} if "save" in when else {}
    targets = ["q_proj"] if "save" in when else ["q_proj", "lm_head"]
    settings |= {"lora_bias": True} if "bias" in when else {}
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False, **settings)

    def run(fused: bool) -> tuple[dict[str, torch.Tensor], Any]:
        torch.manual_seed(1)
        model = llama(attention_bias=True)
        if "bias" in when:
            model.set_output_embeddings(nn.Linear(32, VOCABULARY))
        handle = fuse_cross_entropy(model, chunk_bytes=VOCABULARY * 8 * 4) if fused and before else None
        model = get_peft_model(model, config).double().train()
        handle = fuse_cross_entropy(model, chunk_bytes=VOCABULARY * 8 * 4) if fused and not before else handle
        return gradients(model(input_ids=IDS, labels=IDS).loss, model), handle

    (expected, _), (found, handle) = run(False), run(True)
    if "save" in when:
        assert (handle.record.fused, dict(handle.record.real)) == ((1, {}) if not before else (0, {}))
        assert distance(found, expected) <= 1e-6  # stock rounds the logits to float32
        return
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert [str(change) for change in handle.record.changes()] == [whole("fused cross entropy:")]


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "torch.save": _saved}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_stock_and_has_its_own_head(way: str) -> None:
    model = llama()
    fuse_cross_entropy(model)
    twin = COPIES[way](model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    assert type(twin(IDS).logits) is torch.Tensor
    losses = [each(input_ids=IDS, labels=IDS).loss.detach() for each in (twin, model)]
    assert losses[0] != losses[1]
    handle = fuse_cross_entropy(twin)
    found = twin(input_ids=IDS, labels=IDS).loss.detach()
    assert float(found) == pytest.approx(float(losses[0]), rel=1e-6)  # stock rounds the logits to float32
    assert handle.record.fused == 1


def test_save_pretrained_and_undo(tmp_path: Any) -> None:
    model = llama()
    handle = fuse_cross_entropy(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert tiny.largest_difference(loaded, model) == 0.0
    handle.remove()
    assert "forward" not in vars(model.lm_head)
    assert type(model(IDS).logits) is torch.Tensor


class OwnHead(nn.Module):
    """A head that is no linear layer."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _with_head(head: nn.Module) -> Any:
    model = llama()
    model.set_output_embeddings(head)
    return model


def _sharded() -> Any:
    model = llama()
    model.lm_head.weight = nn.Parameter(torch.empty(0))  # as DeepSpeed ZeRO-3 leaves it
    return model


def _moved() -> Any:
    model = llama()
    model.lm_head._hf_hook = object()
    return model


class QuantisedLinear(nn.Linear):
    """Linear layers of bitsandbytes compute in a way of their own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: "gpt2", "model='gpt2' is not"),
    (tiny.bert, "model=<BertForSequenceClassification>"),
    (lambda: _with_head(OwnHead()), "model=<LlamaForCausalLM> has the"),
    (lambda: _with_head(QuantisedLinear(32, 100)), "model=<LlamaForCausalLM> has a head of"),
    (_sharded, "model=<LlamaForCausalLM> has a head whose"),
    (_moved, "model=<LlamaForCausalLM> has a head that"),
    (lambda: torch.compile(llama(), backend="eager"), "model=<OptimizedModule>"),
]


@pytest.mark.parametrize(("make", "start"), REFUSED, ids=[start for _, start in REFUSED])
def test_what_cannot_be_fused_is_refused(make: Callable[[], Any], start: str) -> None:
    refuses((TypeError, ValueError), whole(start), fuse_cross_entropy, make())


@pytest.mark.parametrize("chunk_bytes", [0, -1, True, 1.5, "64MiB"])
def test_chunk_bytes_out_of_range(chunk_bytes: Any) -> None:
    with pytest.raises(ValueError, match="chunk_bytes=") as error:
        fuse_cross_entropy(llama(), chunk_bytes=chunk_bytes)
    assert f"chunk_bytes={chunk_bytes!r} is invalid; expected an integer of 1 or more, or None" in str(error.value)


def test_a_masked_model_fuses_its_bias() -> None:
    model = BertForMaskedLM(tiny.bert_config()).double().train()
    expected = gradients(model(input_ids=IDS, labels=IDS).loss, model)
    handle = fuse_cross_entropy(model)
    assert distance(gradients(model(input_ids=IDS, labels=IDS).loss, model), expected) <= 1e-7  # stock's float32
    assert [str(change) for change in handle.record.changes()] == [whole("cross entropy: 'logits")]
