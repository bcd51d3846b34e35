"""Fused logits in autograd's graph: a gradient that arrives by any way reaches the model, as in stock."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tables import whole
from torch.utils.checkpoint import checkpoint

import tiny
from hf_memopt.techniques import fuse_cross_entropy
from language_models import distance, gradients

VOCABULARY = 100
IDS = torch.randint(5, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
FLAT = IDS.view(-1)
Use = Callable[[torch.Tensor], torch.Tensor]


def llama(dtype: torch.dtype = torch.float64) -> Any:
    return tiny.llama().to(dtype).train()


def loss_of(logits: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), FLAT, **settings)


def stock_and_fused(run: Callable[[Any], Any], dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[Any, Any]:
    """Return what a run gives for a model as in stock, and once more when it is fused."""
    model = llama(dtype)
    expected = run(model)
    model.zero_grad()
    handle = fuse_cross_entropy(model, **{"chunk_bytes": VOCABULARY * 8 * 4, **settings})
    found = run(model)
    handle.remove()
    return expected, found


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    return 0.1 * logits.logsumexp(-1).pow(2).mean()


def _scaled(logits: torch.Tensor) -> torch.Tensor:
    changed = torch.tanh((2.0 * logits / 3 + torch.arange(VOCABULARY) * 0.1) / 5).mul(5.0)
    return loss_of(changed.clone().to("cpu").to(torch.float64).contiguous() + torch.zeros(1, 1, 1))


def _rows(logits: torch.Tensor) -> torch.Tensor:
    chosen = IDS > 40
    found = F.cross_entropy(logits[chosen], IDS[chosen]) + F.cross_entropy(logits[..., -1, :], IDS[:, -1])
    found = found + F.cross_entropy(logits[0], IDS[0]) + F.cross_entropy(logits[:, 2:].flatten(0, 1), FLAT[:14])
    return found + F.cross_entropy(logits[:, torch.tensor([1, 3])].view(4, -1), IDS[:, [1, 3]].reshape(-1))


def _filled(logits: torch.Tensor) -> torch.Tensor:
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


class OwnCrossEntropy(torch.autograd.Function):
    """A cross entropy with a backward pass of its own, of rows with a label."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        probabilities = logits.float().softmax(-1)
        ctx.save_for_backward(probabilities, target)
        ctx.dtype = logits.dtype
        return F.nll_loss(probabilities.log(), target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, target = ctx.saved_tensors
        labelled = target != -100
        change = probabilities.clone()
        change[labelled, target[labelled]] -= 1
        return (gradient * change * (labelled / labelled.sum())[:, None]).to(ctx.dtype), None


class Tripled(torch.autograd.Function):
    """Three times its argument, in place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(logits.mul_(3))
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def own(logits: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = OwnCrossEntropy.apply(logits.reshape(-1, VOCABULARY), FLAT)
    return found


def _of_target(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits, -1).mean() - logits.gather(1, target.unsqueeze(1)).mean()


def _in_place(logits: torch.Tensor) -> torch.Tensor:
    return logits.mul_(2.0).logsumexp(-1).sum()


with warnings.catch_warnings(action="ignore", category=FutureWarning):  # deprecated in 2.15, and still used
    scripted, scripted_in_place = torch.jit.script(_of_target), torch.jit.script(_in_place)


def straight_through(logits: torch.Tensor) -> torch.Tensor:
    hard = F.one_hot(logits.argmax(-1), VOCABULARY).to(logits.dtype)
    return ((logits + (hard - logits).detach()) * torch.arange(VOCABULARY)).sum() + loss_of(logits)


def asked(logits: torch.Tensor) -> torch.Tensor:
    """Ask for gradients of the logits and of what comes from them, fused and real, and use them."""
    scaled = logits * 0.5 + 0.25
    loss = loss_of(scaled)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss + z_loss(scaled) + z_loss(logits), scaled, retain_graph=True)
    assert type(first) is type(second) is torch.Tensor
    return loss + (10 * (first + second).detach() * logits).sum()


def retained(logits: torch.Tensor) -> torch.Tensor:
    scaled = torch.tanh(logits)
    for kept in (logits, scaled):
        kept.retain_grad()
    (loss_of(scaled) + z_loss(logits)).backward(retain_graph=True)
    assert logits.grad is not None
    assert scaled.grad is not None
    return ((logits.grad + scaled.grad) * logits).sum()


def hooked(logits: torch.Tensor) -> torch.Tensor:
    """Hooks of the logits and of what comes from them, after a first loss; one is removed."""
    scaled = logits * 2.0
    loss = loss_of(scaled)
    scaled.register_hook(lambda gradient: gradient * 5)
    logits.register_hook(lambda gradient: gradient.pow(2) * 100)
    logits.register_hook(lambda gradient: [gradient.mul_(3)].clear())
    logits.register_hook(lambda gradient: gradient * 0).remove()
    return loss + z_loss(logits) + scaled.pow(2).mean()


def twice(logits: torch.Tensor) -> torch.Tensor:
    """A gradient of a gradient, of real logits."""
    capped = torch.tanh(logits * 2.0)
    (gradient,) = torch.autograd.grad(capped.softmax(-1).pow(2).sum(), capped, create_graph=True)
    return gradient.pow(2).sum()


def changed_in_place(logits: torch.Tensor) -> torch.Tensor:
    logits.div_(2.0)
    view = logits[:, :]
    view.mul_(3.0)
    return own(logits) + own(view)


def read_in_inference_mode(logits: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits.argmax(-1)
    return loss_of(logits)


WAYS: dict[str, tuple[int, set[str], Use]] = {
    "scale, bias and softcap": (1, set(), _scaled),
    "rows": (5, set(), _rows),
    "label smoothing": (1, set(), lambda logits: loss_of(logits, label_smoothing=0.1)),
    "sum, ignored": (
        1,
        set(),
        lambda logits: loss_of(logits, label_smoothing=0.3, reduction="sum", ignore_index=int(FLAT[0])),
    ),
    "no label": (
        2,
        set(),
        lambda logits: (
            loss_of(logits, ignore_index=7)
            + F.cross_entropy(logits.view(-1, VOCABULARY), torch.full((18,), -100), reduction="sum")
        ),
    ),
    "read after the loss": (1, set(), lambda logits: loss_of(logits) + logits.shape[-1] + logits.dim()),
    "filled": (0, {"mul_"}, _filled),
    "views": (0, {"mul_"}, _through_views),
    "augmented assignment": (0, {"add_"}, _augmented),
    "alias": (0, {"transpose"}, _through_an_alias),
    "class weights": (0, {"cross_entropy"}, lambda logits: loss_of(logits, weight=torch.arange(100.0).double())),
    "no reduction": (0, {"cross_entropy"}, lambda logits: loss_of(logits, reduction="none").sum()),
    "classes in the middle": (0, {"permute"}, lambda logits: F.cross_entropy(logits.permute(0, 2, 1), IDS)),
    "a loss of the user's": (0, {"log_softmax"}, lambda logits: -logits.log_softmax(-1)[..., 0].mean()),
    "twice": (0, {"add"}, lambda logits: loss_of(logits + logits)),
    "own Function": (0, {"float"}, lambda logits: own(logits[:, :])),
    "own Function of chosen rows": (
        0,
        {"float"},
        lambda logits: OwnCrossEntropy.apply(logits[:, torch.tensor([2, 2, 0])].flatten(0, 1), FLAT[:6]),
    ),
    "own Function of a softcap": (0, {"float"}, lambda logits: own(torch.tanh(logits.to(torch.float64) / 3 + 1) * 3)),
    "own Function and fused loss": (1, {"float"}, lambda logits: loss_of(logits) + own(logits) + logits.sum()),
    "own Function in place": (0, {"mul_"}, lambda logits: own(Tripled.apply(logits))),
    "straight-through": (0, {"argmax"}, straight_through),
    "TorchScript": (0, {"gather", "logsumexp"}, lambda logits: scripted(logits.view(-1, VOCABULARY), FLAT)),
    "reentrant checkpoint": (
        0,
        {"mul"},
        lambda logits: checkpoint(lambda x: loss_of(x * 2), logits, use_reentrant=True),
    ),
    "checkpoint": (1, set(), lambda logits: checkpoint(lambda x: loss_of(x * 2), logits, use_reentrant=False)),
    "autograd.grad": (1, {"grad", "logsumexp"}, asked),
    "retain_grad": (0, {"retain_grad"}, retained),
    "register_hook": (1, {"register_hook"}, hooked),
    "two losses": (1, {"logsumexp"}, lambda logits: loss_of(logits) + z_loss(logits)),
    "tanh and a cast that changes nothing": (1, set(), lambda logits: loss_of(torch.tanh(logits * 3.0).double())),
    "logits by name": (0, {"logsumexp"}, lambda logits: torch.logsumexp(input=logits, dim=-1).pow(2).mean()),
    "two fused losses": (2, set(), lambda logits: loss_of(logits) + loss_of(logits * 2, label_smoothing=0.1)),
    "sum": (0, {"sum"}, lambda logits: logits.sum()),
    "in place": (0, {"div_"}, changed_in_place),
    "gradient of a gradient": (0, {"softmax"}, twice),
    "inference mode": (0, {"argmax"}, read_in_inference_mode),
    "vmap": (0, {"logsumexp"}, lambda logits: torch.vmap(lambda row: row.logsumexp(-1).sum())(logits).sum()),
    "torch.func": (
        0,
        {"view", "reshape", "_log_softmax", "mul"},
        lambda logits: (torch.func.grad(loss_of)(logits) * logits).sum(),
    ),
    "compiled loss": (0, {"logsumexp"}, lambda logits: torch.compile(z_loss, backend="eager")(logits)),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile asks for it
@pytest.mark.parametrize("name", WAYS)
def test_a_gradient_by_any_way_is_stocks(name: str) -> None:
    fused, operations, use = WAYS[name]
    model = llama()
    expected = use(model(IDS).logits)
    expected_gradients = gradients(expected, model)
    record = fuse_cross_entropy(model, chunk_bytes=VOCABULARY * 8 * 4).record
    model.zero_grad()
    logits = model(IDS).logits
    assert type(logits).__name__ == "DeferredLogits"
    found = use(logits)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    found_gradients = gradients(found, model)
    assert any(bool(gradient.any()) for gradient in found_gradients.values())
    assert distance(found_gradients, expected_gradients) <= 1e-12
    assert record.fused == fused
    assert set(record.real) <= operations
    assert bool(record.real) == bool(operations)
    reasons = [change.reason for change in record.changes()]
    assert all(any(operation in reason for reason in reasons) for operation in record.real)
    assert len(record.changes()) == len(record.real) + bool(fused)


def by_parameters(model: Any, loss: torch.Tensor) -> torch.Tensor:
    """A loss and a penalty on its gradient by what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return loss + sum(one.pow(2).sum() for one in torch.autograd.grad(loss, trained, create_graph=True))


def by_logits(model: Any) -> torch.Tensor:
    logits = model(IDS).logits[:, :-1].reshape(-1, VOCABULARY)
    loss = F.cross_entropy(logits, IDS[:, 1:].reshape(-1))
    return loss + 100 * torch.autograd.grad(loss, logits, create_graph=True)[0].pow(2).sum()


def by_logits_twice(model: Any) -> torch.Tensor:
    """The product of the logits' Hessian with a vector, and a gradient of it."""
    logits = model(IDS).logits
    (first,) = torch.autograd.grad(loss_of(logits * 2.0), logits, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.arange(VOCABULARY)).sum(), logits, create_graph=True)
    return second.pow(2).sum()


def by_the_input(model: Any) -> torch.Tensor:
    """Virtual adversarial training: the gradient by the embeddings moves them."""
    embedded = model.model.embed_tokens(IDS)
    loss = loss_of(model(inputs_embeds=embedded).logits)
    (direction,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + loss_of(model(inputs_embeds=embedded + 0.1 * direction).logits)


def by_a_weight_through_a_softcap(model: Any) -> torch.Tensor:
    capped = torch.tanh(model(IDS).logits / 3.0)[:, 1:] * 3.0
    loss = F.cross_entropy(capped.reshape(-1, VOCABULARY), FLAT[:16], label_smoothing=0.1)
    return loss + torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)[0].pow(2).sum()


def by_chosen_rows(model: Any) -> torch.Tensor:
    """Rows of logits that are read and kept, of a sum whose first label is ignored."""
    logits = model(IDS).logits
    chosen = logits[IDS > 20]
    settings = {"reduction": "sum", "ignore_index": int(IDS[IDS > 20][0])}
    return by_parameters(model, F.cross_entropy(chosen, IDS[IDS > 20], **settings) / chosen.argmax(-1).sum())


def by_what_is_changed_later(model: Any) -> torch.Tensor:
    logits = model(IDS).logits
    loss = loss_of(logits) * logits.exp().mean()
    logits.mul_(2)
    return by_parameters(model, loss) + loss_of(logits)


def by_backward(model: Any) -> torch.Tensor:
    loss_of(model(IDS).logits).backward(create_graph=True)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return sum(gradient.pow(2).sum() for gradient in gradients)


def by_a_checkpointed_head(model: Any) -> torch.Tensor:
    hidden = model.model(IDS).last_hidden_state
    return by_parameters(model, checkpoint(lambda x: loss_of(model.lm_head(x)), hidden, use_reentrant=False))


def by_a_frozen_head(model: Any) -> torch.Tensor:
    model.lm_head.requires_grad_(False)
    return by_parameters(model, loss_of(model(IDS).logits))


SECOND: dict[str, Callable[[Any], torch.Tensor]] = {
    "logits": by_logits,
    "logits, twice": by_logits_twice,
    "embeddings": by_the_input,
    "parameters": lambda model: by_parameters(model, loss_of(model(IDS).logits)),
    "a power of the loss": lambda model: by_parameters(model, loss_of(model(IDS).logits).pow(2)),
    "two losses": lambda model: by_parameters(model, loss_of(model(IDS).logits) + loss_of(model(IDS).logits * 2)),
    "a softcap": by_a_weight_through_a_softcap,
    "chosen rows": by_chosen_rows,
    "changed in place": by_what_is_changed_later,
    "backward": by_backward,
    "checkpoint": by_a_checkpointed_head,
    "frozen head": by_a_frozen_head,
}


# torch's note on a reference cycle that create_graph=True makes
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative_is_stocks(name: str) -> None:
    def trained(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
        model.set_attn_implementation("eager")  # the fused kernel has no second derivative
        loss = SECOND[name](model)
        return float(loss.detach()), gradients(loss, model)

    expected, found = stock_and_fused(trained)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert distance(found[1], expected[1]) <= 1e-12


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_a_second_derivative_in_fewer_bits(dtype: torch.dtype, error: float) -> None:
    def trained(model: Any) -> dict[str, torch.Tensor]:
        model.set_attn_implementation("eager")
        return gradients(by_parameters(model, loss_of(model(IDS).logits)), model)

    expected, found = stock_and_fused(trained, dtype)
    assert distance(found, expected) <= error


@pytest.mark.parametrize("read", [torch.argmax, torch.vmap(torch.sum)], ids=["made real", "read"])
def test_a_graph_keeps_no_logits_that_were_read(read: Callable[..., Any]) -> None:
    model = llama()
    fuse_cross_entropy(model)
    logits = model(IDS).logits
    loss = loss_of(torch.tanh(logits * 2.0))
    read(logits)
    (large,) = (one for one in (logits._read, logits._real) if one is not None)
    kept = [weakref.ref(logits), weakref.ref(large)]
    del logits, large
    assert [reference() for reference in kept] == [None, None]
    loss.backward()


@pytest.mark.parametrize("name", [name for name, (fused, operations, _) in WAYS.items() if fused and not operations])
def test_what_is_remembered_needs_no_logits_in_16_bits(name: str) -> None:
    """Made in the backward pass, slice by slice of the vocabulary; a bfloat16 has 8 bits."""
    model = llama(torch.bfloat16)
    expected = gradients(WAYS[name][2](model(IDS).logits), model)
    handle = fuse_cross_entropy(model, chunk_bytes=2 * 4 * 32 * 30)  # slices of 30 columns
    found = gradients(WAYS[name][2](model(IDS).logits), model)
    assert handle.record.fused > 0
    assert not handle.record.real
    assert distance(found, expected) <= 2**-6


def test_a_factor_with_a_dimension_decides_on_the_dtype() -> None:
    """bfloat16 times one float32 of shape (1,) is float32, of shape () it is bfloat16."""
    for factor in (torch.tensor([0.37]), torch.tensor(0.37)):
        expected, found = stock_and_fused(lambda model, by=factor: loss_of(model(IDS).logits * by), torch.bfloat16)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6 if factor.dim() else 1e-2)
        assert found.dtype == torch.float32 or not factor.dim()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_mean_over_no_label_is_not_a_number_and_has_no_gradient(dtype: torch.dtype) -> None:
    model = llama(dtype)
    fuse_cross_entropy(model)
    loss = F.cross_entropy(model(IDS).logits.view(-1, VOCABULARY), torch.full((18,), -100))
    assert bool(loss.isnan())
    assert all(not bool(gradient.any()) for gradient in gradients(loss, model).values())


@pytest.mark.parametrize("name", ["own Function", "TorchScript", "sum", "straight-through", "in place"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_real_logits_are_stocks_bit_for_bit(name: str, precision: str) -> None:
    def trained(model: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = WAYS[name][2](model(IDS).logits)
        return gradients(loss, model)

    expected, found = stock_and_fused(trained, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    for parameter, gradient in found.items():
        assert torch.equal(gradient, expected[parameter]), parameter


@pytest.mark.parametrize(("precision", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
def test_fused_and_real_gradients_add_up_in_16_bits_too(precision: torch.dtype, error: float) -> None:
    use = WAYS["two losses"][2]
    settings = {"chunk_bytes": 2 * 4 * 32 * 30}
    expected, found = stock_and_fused(lambda model: gradients(use(model(IDS).logits), model), precision, **settings)
    assert distance(found, expected) <= error


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", ["head", "head and loss", "head and two losses"])
def test_a_checkpoint_around_the_head(inside: str, reentrant: bool) -> None:
    def trained(model: Any) -> dict[str, torch.Tensor]:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            logits = model.lm_head(hidden)
            if inside == "head":
                return logits
            return loss_of(logits) + (z_loss(logits) if "two" in inside else 0)

        result = checkpoint(run, model.model(IDS).last_hidden_state, use_reentrant=reentrant)
        return gradients(loss_of(result) if inside == "head" else result, model)

    expected, found = stock_and_fused(trained)
    assert distance(found, expected) <= 1e-12


def test_gradients_given_to_the_logits() -> None:
    """By all three ways to start a backward pass at them."""
    model = llama()
    weight, vector = model.lm_head.weight, torch.randn(2, 9, VOCABULARY, dtype=torch.float64)
    (expected,) = torch.autograd.grad(model(IDS).logits * 2, weight, vector)
    fuse_cross_entropy(model)
    (found,) = torch.autograd.grad(model(IDS).logits * 2, weight, vector)
    assert torch.equal(found, expected)
    for start in (lambda logits: logits.backward(vector), lambda logits: torch.autograd.backward([logits], [vector])):
        model.zero_grad()
        start(model(IDS).logits * 2)
        assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("settings", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
# torch looks for unused parameters, of which a model of one process has none
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
def test_ddps_own_function_leaves_them_deferred(settings: dict[str, bool], tmp_path: Any) -> None:
    """It copies each output, in a Function; the loss here is outside of the model's forward."""
    model = llama()
    expected = gradients(loss_of(model(IDS).logits), model)
    record = fuse_cross_entropy(model).record
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, **settings)
        for _ in range(2):
            assert distance(gradients(loss_of(wrapped(IDS).logits), model), expected) <= 1e-12
    finally:
        wrapped = None  # first: its reducer would free the group with Python's lock held, and wait for its threads
        torch.distributed.destroy_process_group()
    assert (record.fused, dict(record.real)) == (2, {})


def test_what_a_hook_keeps_can_be_read_after_the_optimizers_step() -> None:
    def kept(model: Any) -> torch.Tensor:
        seen, logits = [], model(IDS).logits
        logits.register_hook(seen.append)
        loss_of(logits).backward()
        torch.optim.SGD(model.parameters(), lr=1e-9).step()
        assert type(seen[0]) is torch.Tensor
        return seen[0]

    expected, found = stock_and_fused(kept)
    assert float((found - expected).abs().max()) <= 1e-9  # the step between the two


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_rows_without_a_label_and_smoothing(dtype: torch.dtype, error: float, reduction: str) -> None:
    labels, settings = FLAT.where(FLAT > 40, -100), {"label_smoothing": 0.2, "reduction": reduction}

    def of_logits(model: Any) -> torch.Tensor:
        logits = model(IDS).logits
        return torch.autograd.grad(F.cross_entropy(logits.view(-1, VOCABULARY), labels, **settings), logits)[0]

    expected, found = stock_and_fused(of_logits, dtype)
    assert float((found - expected).abs().max()) <= error * float(expected.abs().max())


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_detection_reads_every_gradient() -> None:
    with torch.autograd.detect_anomaly():
        expected, found = stock_and_fused(lambda model: gradients(loss_of(model(IDS).logits * 2.0 / 2.0), model))
    assert distance(found, expected) <= 1e-12


def test_an_operation_in_place_below_torchs_python_is_refused_with_a_remedy() -> None:
    def in_place(logits: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.mul_(2).logsumexp(-1).sum())(logits).sum()

    model = llama()
    expected = gradients(in_place(model(IDS).logits), model)
    fuse_cross_entropy(model)
    logits = model(IDS).logits
    assert repr(logits) == "DeferredLogits(shape=(2, 9, 100), dtype=torch.float64)"
    with pytest.raises(RuntimeError) as error:
        in_place(logits)
    assert str(error.value) == whole("mul_ was called below")
    with pytest.raises(RuntimeError):  # TorchScript keeps no message
        scripted_in_place(logits)
    variables = {"logits": logits}
    exec(str(error.value).partition("Make them real first: ")[2], variables)
    assert distance(gradients(in_place(variables["logits"]), model), expected) <= 1e-12
