"""What is done to fused logits: in place, as views, by losses of other kinds, twice; copies, refusals, memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import BertForMaskedLM

import tiny
from hf_memopt.binding.fused_loss import DeferredLogits, fuse_cross_entropy
from hf_memopt.binding.fused_loss.chunked_loss import CHUNK_BYTES, Loss
from hf_memopt.memory.cuda import CudaSemantics, run_backward
from hf_memopt.memory.tracking import StorageTracker
from language_models import distance, gradients

VOCABULARY = 100
IDS = torch.randint(5, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
FLAT = IDS.view(-1)


def llama(**settings: Any) -> Any:
    return tiny.llama(**settings).double().train()


def loss_of(logits: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), FLAT, **settings)


# ---- Fused ----------------------------------------------------------------------------------------------------------


def _scaled(logits: torch.Tensor) -> torch.Tensor:
    changed = torch.tanh((2.0 * logits / 3 + torch.arange(VOCABULARY) * 0.1) / 5).mul(5.0)
    return loss_of(changed.clone().to("cpu").to(torch.float64).contiguous() + torch.zeros(1, 1, 1))


def _rows(logits: torch.Tensor) -> torch.Tensor:
    chosen = IDS > 40
    found = F.cross_entropy(logits[chosen], IDS[chosen]) + F.cross_entropy(logits[..., -1, :], IDS[:, -1])
    found = found + F.cross_entropy(logits[0], IDS[0]) + F.cross_entropy(logits[:, 2:].flatten(0, 1), FLAT[:14])
    return found + F.cross_entropy(logits[:, torch.tensor([1, 3])].view(4, -1), IDS[:, [1, 3]].reshape(-1))


REMEMBERED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scale, bias and softcap": _scaled,
    "rows": _rows,
    "label smoothing": lambda logits: loss_of(logits, label_smoothing=0.1),
    "sum, ignored": lambda logits: loss_of(logits, label_smoothing=0.3, reduction="sum", ignore_index=int(FLAT[0])),
    "no label": lambda logits: (
        loss_of(logits, ignore_index=7)
        + F.cross_entropy(logits.view(-1, VOCABULARY), torch.full((18,), -100), reduction="sum")
    ),
    "read after the loss": lambda logits: loss_of(logits) + logits.shape[-1] + logits.dim(),
}


def same_as_stock(use: Callable[[torch.Tensor], torch.Tensor], fused: bool, **settings: Any) -> Any:
    """Check loss and gradients of a use of the logits against stock's; return what was recorded."""
    model = llama(**settings)
    expected = use(model(IDS).logits)
    expected_gradients = gradients(expected, model)
    handle = fuse_cross_entropy(model, chunk_bytes=VOCABULARY * 8 * 4)
    logits = model(IDS).logits
    assert type(logits) is DeferredLogits
    found = use(logits)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-14)
    assert distance(gradients(found, model), expected_gradients) <= 1e-12
    assert (handle.record.fused > 0, not handle.record.real) == (fused, fused)
    return handle.record


@pytest.mark.parametrize("name", REMEMBERED)
def test_what_is_remembered_needs_no_logits(name: str) -> None:
    same_as_stock(REMEMBERED[name], True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_mean_over_no_label_is_not_a_number_and_has_no_gradient(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    fuse_cross_entropy(model)
    loss = F.cross_entropy(model(IDS).logits.view(-1, VOCABULARY), torch.full((18,), -100))
    assert bool(loss.isnan())
    assert all(not bool(gradient.any()) for gradient in gradients(loss, model).values())


@pytest.mark.parametrize("name", REMEMBERED)
def test_what_is_remembered_needs_no_logits_in_16_bits(name: str) -> None:
    """Made in the backward pass, slice by slice of the vocabulary; a bfloat16 has 8 bits."""
    model = llama().bfloat16()
    expected = gradients(REMEMBERED[name](model(IDS).logits), model)
    handle = fuse_cross_entropy(model, chunk_bytes=2 * 4 * 32 * 30)  # slices of 30 columns
    found = gradients(REMEMBERED[name](model(IDS).logits), model)
    assert handle.record.fused > 0
    assert not handle.record.real
    assert distance(found, expected) <= 2**-6


# ---- Real for good --------------------------------------------------------------------------------------------------


def _in_place(logits: torch.Tensor) -> torch.Tensor:
    logits.mul_(5)
    logits[..., :3] = -1e4
    return loss_of(logits)


def _through_views(logits: torch.Tensor) -> torch.Tensor:
    """A view sees the change, a copy does not."""
    view, copied = logits[:, :-1], logits * 2.0
    logits.mul_(3)
    targets = IDS[:, 1:].reshape(-1)
    found = F.cross_entropy(view.reshape(-1, VOCABULARY), targets)
    return found + F.cross_entropy(copied[:, :-1].reshape(-1, VOCABULARY), targets)


def _augmented(logits: torch.Tensor) -> torch.Tensor:
    logits += torch.arange(VOCABULARY)
    logits *= 2
    logits[0, :3].mul_(4)
    return loss_of(logits)


def _through_an_alias(logits: torch.Tensor) -> torch.Tensor:
    turned = logits.transpose(0, 1)
    turned.mul_(2)
    return loss_of(logits)


MADE_REAL: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "in place": ("mul_", _in_place),
    "views": ("mul_", _through_views),
    "augmented assignment": ("add_", _augmented),
    "alias": ("transpose", _through_an_alias),
    "class weights": ("cross_entropy", lambda logits: loss_of(logits, weight=torch.arange(100.0).double())),
    "no reduction": ("cross_entropy", lambda logits: loss_of(logits, reduction="none").sum()),
    "classes in the middle": ("permute", lambda logits: F.cross_entropy(logits.permute(0, 2, 1), IDS)),
    "a loss of the user's": ("log_softmax", lambda logits: -logits.log_softmax(-1)[..., 0].mean()),
    "twice": ("add", lambda logits: loss_of(logits + logits)),
    "joined": ("cat", lambda logits: loss_of(torch.cat([logits, logits])[:2])),
    "read before": ("argmax", lambda logits: loss_of(logits) if logits.argmax(-1).shape == IDS.shape else logits.sum()),
}


@pytest.mark.parametrize("name", MADE_REAL)
def test_what_needs_the_elements_gets_the_real_logits(name: str) -> None:
    operation, use = MADE_REAL[name]
    record = same_as_stock(use, False)
    assert operation in record.real
    assert any(operation in change.reason for change in record.changes())


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
    with pytest.raises(RuntimeError) as error:
        output.logits.argmax(-1)
    assert str(error.value) == (
        "logits of shape (2, 9, 100) are read after a tensor of shape (100, 32) that they are computed from was "
        "changed, by an optimizer step for example; expected to be read before. Read them before loss.backward(), "
        "or keep them there: logits = outputs.logits.detach().clone()"
    )


def test_evaluation_and_no_gradients_give_plain_logits() -> None:
    model = llama()
    handle = fuse_cross_entropy(model)
    with torch.no_grad():
        assert type(model(IDS).logits) is torch.Tensor
    assert type(model.eval()(IDS).logits) is torch.Tensor
    assert type(model.train().requires_grad_(False)(IDS).logits) is torch.Tensor
    assert not handle.record.changes()


# ---- Backward -------------------------------------------------------------------------------------------------------


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
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    assert str(error.value) == (
        "loss.backward() was called a second time and the gradients of the first were given away; expected one "
        "backward pass, or retain_graph=True in all but the last. Call loss.backward(retain_graph=True) first"
    )


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
@pytest.mark.parametrize("when", ["LoRA on the head", "head in modules_to_save", "LoRA and a bias"])
def test_adapters_on_the_head(when: str) -> None:
    """Fused after PEFT has wrapped the model: what is added to the logits needs them."""
    settings = {"modules_to_save": ["lm_head"]} if "save" in when else {}
    targets = ["q_proj"] if "save" in when else ["q_proj", "lm_head"]
    settings |= {"lora_bias": True} if "bias" in when else {}
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False, **settings)
    torch.manual_seed(1)
    base = llama(attention_bias=True)
    if "bias" in when:
        base.set_output_embeddings(nn.Linear(32, VOCABULARY))
    model = get_peft_model(base, config).double().train()
    expected = gradients(model(input_ids=IDS, labels=IDS).loss, model)
    handle = fuse_cross_entropy(model, chunk_bytes=VOCABULARY * 8 * 4)
    found = gradients(model(input_ids=IDS, labels=IDS).loss, model)
    fused = "save" in when
    assert (handle.record.fused, dict(handle.record.real)) == ((1, {}) if fused else (0, {"add": 1}))
    assert distance(found, expected) <= (1e-6 if fused else 0.0)  # stock rounds the logits to float32


# ---- Copies ---------------------------------------------------------------------------------------------------------


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


# ---- Memory ---------------------------------------------------------------------------------------------------------


def test_chunks_have_as_many_bytes_as_the_hidden_states_or_64_mib() -> None:
    def rows(hidden: torch.Tensor, chunk_bytes: int | None = None) -> int:
        loss = Loss((), torch.bfloat16, chunk_bytes, -100, True, 0.0)
        return loss.rows(hidden, 1000)

    hidden = torch.empty(8, 4, device="meta")
    assert rows(hidden) == CHUNK_BYTES // 4000
    assert rows(torch.empty(2**20, 2**10, device="meta")) == 2**32 // 4000
    assert (rows(hidden, 8000), rows(hidden, 1)) == (2, 1)


def peaks(fused: bool, autocast: torch.dtype | None) -> tuple[int, int]:
    """Return the largest storage and the peak of a step of a large head on the meta device, with CUDA's allocations."""
    with torch.device("meta"):
        model = tiny.llama(vocab_size=50_000).train()
        inputs = {"input_ids": torch.zeros(8, 64, dtype=torch.long), "labels": torch.zeros(8, 64, dtype=torch.long)}
    if fused:
        fuse_cross_entropy(model, chunk_bytes=50_000 * 4 * 64)
    tracker = StorageTracker()
    for parameter in model.parameters():
        tracker.add(parameter)
    with tracker, CudaSemantics(autocast=autocast, tracker=tracker) as semantics:
        with semantics.autocast_region():
            loss = model(**inputs).loss
        with tracker.backward():
            run_backward(loss, torch.ones_like(loss))
    tracker.close()
    held = peak = 0
    for _, change in tracker.events:
        held += change
        peak = max(peak, held)
    return max(tracker.sizes), peak


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_on_meta_the_same_code_runs_without_logits(autocast: torch.dtype | None) -> None:
    """All rows count as labelled there; 512 rows of logits are 98 MiB in float32, 64 rows of a chunk 12 MiB."""
    (_, stock), (largest, fused) = (peaks(way, autocast) for way in (False, True))
    chunk = 50_000 * 4 * 64
    assert largest <= chunk
    assert stock - fused >= 2 * 50_000 * 4 * 512 - 4 * chunk


def test_the_memory_of_a_chunk_on_the_cpu_is_that_on_meta() -> None:
    """Bytes of all storages above 1 MiB, of real tensors with a label in every row and of meta tensors."""

    def sizes(device: str) -> list[int]:
        with torch.device(device):
            model = tiny.llama(vocab_size=20_000).train()
            ids = torch.ones(4, 32, dtype=torch.long)
        fuse_cross_entropy(model, chunk_bytes=20_000 * 4 * 30)
        tracker = StorageTracker(device_type=device)
        with tracker:
            loss = model(input_ids=ids, labels=ids, shift_labels=ids).loss
            with tracker.backward():
                loss.backward()
        tracker.close()
        return [change for _, change in tracker.events if abs(change) > 2**20]

    assert sizes("cpu") == sizes("meta")


# ---- Refused --------------------------------------------------------------------------------------------------------


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


REFUSED: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    (
        "no module",
        lambda: "gpt2",
        TypeError,
        "model='gpt2' is not a torch.nn.Module; expected the model to train. Pass the model that from_pretrained "
        "returns",
    ),
    (
        "no output embeddings",
        tiny.bert,
        ValueError,
        "model=<BertForSequenceClassification> has no output embeddings; expected a causal, masked or "
        "sequence-to-sequence language model. Leave fuse_cross_entropy out: a small head has small logits",
    ),
    (
        "no linear layer",
        lambda: _with_head(OwnHead()),
        TypeError,
        "model=<LlamaForCausalLM> has the output embeddings <OwnHead>, which is not a linear layer; expected "
        "torch.nn.Linear. Leave fuse_cross_entropy out",
    ),
    (
        "quantised",
        lambda: _with_head(QuantisedLinear(32, 100)),
        TypeError,
        "model=<LlamaForCausalLM> has a head of class QuantisedLinear, whose weights are not a plain matrix; expected "
        'torch.nn.Linear. Leave the head out of the quantisation: llm_int8_skip_modules=["lm_head"]',
    ),
    (
        "sharded",
        _sharded,
        ValueError,
        "model=<LlamaForCausalLM> has a head whose weight is sharded over processes, of shape (0,) here; expected all "
        "of the vocabulary in each process. Leave fuse_cross_entropy out under FSDP, DeepSpeed ZeRO-3 and tensor "
        "parallelism",
    ),
    (
        "moved between devices",
        _moved,
        ValueError,
        "model=<LlamaForCausalLM> has a head that accelerate moves between devices; expected the whole model on one. "
        'Load it with device_map={"": 0}',
    ),
    (
        "compiled",
        lambda: torch.compile(llama(), backend="eager"),
        ValueError,
        "model=<OptimizedModule> is compiled, and logits without storage break its graph; expected a model that is "
        "not. Leave torch.compile out",
    ),
]


@pytest.mark.parametrize(("name", "make", "kind", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_be_fused_is_refused(
    name: str, make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as error:
        fuse_cross_entropy(make())
    assert str(error.value) == message


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
    assert [str(change) for change in handle.record.changes()] == [
        "cross entropy: 'logits of the whole batch' -> 'chunks of at most 64.0 MiB of logits or as many bytes as the "
        "hidden states' (cls.predictions.decoder and the loss are one operation over labelled rows)"
    ]
