"""The rows of a batch in parts: losses and gradients of the whole batch, and a refusal where they would not be."""

from __future__ import annotations

import copy
import gc
import random
import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import bitsandbytes
import numpy as np
import pytest
import row_models
import torch
from row_models import ARCHITECTURES, ROWS, STEPS, TRAINED, WORDS
from slow_cases import slow_except
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.training.binding.undo import RandomState
from hf_memopt.training.techniques.microbatching import Backbones, Size
from hf_memopt.training.techniques.microbatching import backbones as backbones_module
from hf_memopt.training.techniques.microbatching.backbones import CutStep
from hf_memopt.training.techniques.microbatching.module_call import DependentRowsError, ModuleCall
from hf_memopt.training.techniques.microbatching.rows_in_parts import PartsFailedError
from two_ranks import run_pair

PART = 3  # of 7 rows: the last part has one
FLOAT64 = 1e-12  # rows added in another order


class Outcome(NamedTuple):
    """What a step gives."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    seen: CutStep
    model: nn.Module


def in_parts(rows: int, names: Sequence[str] = ()) -> Backbones:
    return Backbones(names, Size(lambda columns: rows, lambda *failed: pytest.fail(f"out of memory: {failed}")))


def run(
    step: Callable[[nn.Module], torch.Tensor], model: nn.Module, rows: int = PART, names: Sequence[str] = ()
) -> Outcome:
    """Run a step on a copy of a model, with the rows in parts."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    with in_parts(rows, names).cut(model) as seen:
        loss = step(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss.detach(), gradients, seen, model)


def worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of gradients, in parts of the largest gradient."""
    assert found.keys() == expected.keys() != set()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((found[name] - gradient).abs().max()) for name, gradient in expected.items()) / largest


def assert_exact(
    step: Callable[[nn.Module], torch.Tensor], model: nn.Module, tolerance: float = FLOAT64, names: Sequence[str] = ()
) -> Outcome:
    """Hold a step in parts against the same step uncut."""
    whole, parts = run(step, model, 99, names), run(step, model, PART, names)
    assert parts.seen.cut > 0, parts.seen.reasons
    assert float((whole.loss - parts.loss).abs()) <= tolerance * max(1.0, float(whole.loss.abs()))
    assert worst(parts.gradients, whole.gradients) <= tolerance
    return parts


QUICK = (
    *(("bert", "supcon"), ("llama-tied", "own"), ("mixtral", "attack"), ("mamba", "own")),
    *(("t5", "supcon"), ("vit", "attack"), ("wav2vec2", "own"), ("clip", "supcon")),
)


@pytest.mark.parametrize(("name", "step"), slow_except(QUICK, product(ARCHITECTURES, STEPS)))
def test_loss_and_gradients_are_those_of_the_whole_batch(name: str, step: str) -> None:
    architecture = ARCHITECTURES[name]
    batch = architecture.batch(ROWS)
    assert_exact(lambda model: STEPS[step](model, batch), row_models.build(name), architecture.tolerance)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_pair(folder, row_models.__file__, str(folder), timeout_seconds=300)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss"), TRAINED)
def test_accumulation_in_two_processes(name: str, loss: str, ranks: list[dict[str, Any]]) -> None:
    for difference, cut_steps in (found[f"{name}: {loss}"] for found in ranks):
        assert difference <= FLOAT64
        assert cut_steps == 2


Mix = Callable[[Any, torch.Tensor, torch.Tensor], Any]


class Meter:
    """An object of a user's."""

    count = 0


class Body(nn.Module):
    """A backbone that does with its rows what a test says: ``mix`` gets it, the hidden states and the ids."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.words, self.linear, self.mix = nn.Embedding(WORDS, 8), nn.Linear(8, 8), mix
        self.norm = nn.BatchNorm1d(10)
        self.scaled = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("count", torch.zeros(()))
        self.fixed = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.calls, self.dropout, self.p = 0, 0.5, 0.1
        self.seen: list[Any] = []
        self.last: dict[str, Any] = {}
        self.bank: dict[str, Any] = {"losses": deque(maxlen=2), "meter": Meter()}

    def forward(self, input_ids: torch.Tensor, groups: torch.Tensor | None = None) -> Any:
        hidden = torch.tanh(self.linear(self.words(input_ids)))
        return self.mix(self, hidden, input_ids if groups is None else groups)


class Model(nn.Module):
    """A classifier over a body; no class of transformers."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.body, self.head = Body(mix), nn.Linear(8, 3)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        found = self.body(**inputs)
        return self.head((found[0] if isinstance(found, tuple) else found).mean(1))


def with_body(mix: Mix) -> Model:
    torch.manual_seed(0)
    return Model(mix).double().train()


IDS = row_models.classified(ROWS).inputs["input_ids"]
CLASSES = row_models.classified(ROWS).classes


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def step_with(**inputs: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    """Return a step whose loss compares rows."""
    return lambda model: backward(row_models.supcon(model(**{"input_ids": IDS, **inputs}), CLASSES))


def doing(change: Callable[[Any, torch.Tensor], object]) -> Mix:
    """Return what changes a body beside its output."""

    def mix(body: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        change(body, hidden)
        return hidden

    return mix


def grouped(body: Any, hidden: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Rows of a group see each other."""
    same = (groups[:, None] == groups).to(hidden.dtype)
    return torch.einsum("ij,jkl->ikl", same, hidden)


def masked_by_numpy(body: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return hidden * torch.from_numpy(np.random.random(hidden.shape[:2]) < 0.7)[..., None]


def move(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.9 + 1


DIFFER = "rows depend on each other: parts of its output 0 of shape (7, 10, 8) differ from the whole by #"
CHANGES = "its forward pass changes {}, which parts would change several times"
DRAWS = "it draws random numbers other than dropout's, so that parts draw others than the whole"
DEPENDENT: dict[str, tuple[Mix, str]] = {
    "mean of rows": (lambda body, hidden, ids: hidden - hidden.mean(0), DIFFER),
    "mean, 1e-9 of it": (lambda body, hidden, ids: hidden + 1e-9 * hidden.mean(0), DIFFER),
    "rows rolled": (lambda body, hidden, ids: hidden + hidden.roll(1, 0), DIFFER),
    "if any row": (lambda body, hidden, ids: hidden * 2 if (ids > 95).any() else hidden, DIFFER),
    "by the batch's size": (lambda body, hidden, ids: hidden * len(hidden), DIFFER),
    "batch norm": (lambda body, hidden, ids: body.norm(hidden), DIFFER),
    "mean as a second output": (
        lambda body, hidden, ids: (hidden, hidden.mean()),
        "rows depend on each other: parts of its output 1 of shape () differ from the whole by #",
    ),
    "the longest row": (
        lambda body, hidden, ids: hidden[:, : int(ids.ne(0).any(0).nonzero().max()) + 1],
        "parts of its output 0 of shape (7, 10, 8) have shapes that do not join",
    ),
    "no rows": (lambda body, hidden, ids: body.words.weight[:7, None], "none of its outputs has rows"),
    "a number that is 0 by chance": (
        lambda body, hidden, ids: (hidden, 0 * hidden.mean()),
        "its output 1 is one number for all rows, as a loss or a scale is",
    ),
    "a number of all rows": (
        lambda body, hidden, ids: (hidden, int(ids.ne(0).sum())),
        "rows depend on each other: its output 1, the int 58, is another one for other rows",
    ),
    "permutation": (lambda body, hidden, ids: hidden + hidden[torch.randperm(len(hidden))], DRAWS),
    "augmentation": (masked_by_numpy, DRAWS),
    "rows mixed with a probability p": (
        lambda body, hidden, ids: hidden.lerp(hidden.flip(0), random.random()) if random.random() < body.p else hidden,
        DRAWS,
    ),
    "one number for all rows": (lambda body, hidden, ids: hidden * random.random(), DRAWS),
    "spectral norm": (
        lambda body, hidden, ids: body.scaled(hidden),
        CHANGES.format("scaled.parametrizations.weight.0._u"),
    ),
    "buffer in place": (doing(lambda body, hidden: body.count.add_(1)), CHANGES.format("count")),
    "buffer": (doing(lambda body, hidden: setattr(body, "count", body.count + 1)), CHANGES.format("count")),
    "fixed weight": (doing(lambda body, hidden: move(body.fixed)), CHANGES.format("fixed")),
    "number": (doing(lambda body, hidden: setattr(body, "calls", body.calls + 1)), CHANGES.format("calls")),
    "tensor": (doing(lambda body, hidden: setattr(body, "kept", hidden)), CHANGES.format("kept")),
    "list": (doing(lambda body, hidden: body.seen.append(1)), CHANGES.format("seen")),
    "entry of a dict": (doing(lambda body, hidden: body.last.update(x=hidden)), CHANGES.format("last")),
    "deque in a dict": (doing(lambda body, hidden: body.bank["losses"].append(hidden.mean())), CHANGES.format("bank")),
    "object in a dict": (
        doing(lambda body, hidden: setattr(body.bank["meter"], "count", body.bank["meter"].count + 1)),
        CHANGES.format("bank"),
    ),
}


def reasons(seen: CutStep) -> list[str]:
    """Return why calls ran whole, without the sizes of errors."""
    return [re.sub(r"[\d.]+e[+-]\d+", "#", reason) for reason in seen.reasons]


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_parts_would_change_is_refused_and_runs_as_if_never_checked(name: str) -> None:
    mix, reason = DEPENDENT[name]
    finished = []
    for rows in (99, PART):
        random.seed(1)
        np.random.seed(1)
        model = with_body(mix)
        outcome = run(step_with(), model, rows, ["body"])
        own = {key: getattr(outcome.model.body, key) for key in ("calls", "p", "seen", "training")}
        own["modes"] = [module.training for module in outcome.model.modules()]
        own["last"] = list(outcome.model.body.last)
        finished.append(
            (outcome, own, repr((torch.get_rng_state().tolist(), np.random.get_state(legacy=False), random.getstate())))
        )
    (whole, expected, numbers), (parts, own, numbers_of_parts) = finished
    assert (parts.seen.cut, reasons(parts.seen)) == (0, [f"body: {reason}"])
    assert torch.equal(whole.loss, parts.loss)
    assert worst(parts.gradients, whole.gradients) == 0.0
    assert own == expected
    assert numbers_of_parts == numbers
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[key]), key


COUNTS = torch.zeros(ROWS)
SPANS = [torch.tensor(2.0)] * ROWS  # entries that are equal here, where no value shows to which rows they belong
INPUTS_REFUSED: dict[str, tuple[Mix, Any, str]] = {
    # which come apart at no cut, or have one row each: the check gives rows the content of others, and their group too
    **{
        f"groups {groups}": (grouped, torch.tensor(groups), "rows depend on each other: ")
        for groups in ([0, 0, 1, 1, 2, 2, 3], [0, 0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 4, 5, 6])
    },
    "a list with an entry for each row": (
        lambda body, hidden, spans: hidden * torch.stack(spans)[: len(hidden), None, None],
        SPANS,
        "its input groups is a list with an entry for each row, and only tensors are cut",
    ),
    "an input changed in place": (
        lambda body, hidden, counts: hidden * counts.add_(1)[:, None, None],
        COUNTS,
        "it changes an input of shape (7,) in place, which parts would change twice",
    ),
}


@pytest.mark.parametrize("name", INPUTS_REFUSED)
def test_inputs_that_cannot_be_cut_are_refused(name: str) -> None:
    mix, given, reason = INPUTS_REFUSED[name]
    outcome = run(step_with(groups=given), with_body(mix), names=["body"])
    assert outcome.seen.cut == 0
    assert reasons(outcome.seen)[0].startswith(f"body: {reason}")
    assert name != "an input changed in place" or COUNTS.tolist() == [1] * ROWS  # once


def named_hook(module: nn.Module, args: Any, output: Any) -> None:
    rows_seen.append(len(output))


rows_seen: list[int] = []


def test_a_hook_inside_is_refused_by_name_and_one_on_the_backbone_sees_all_rows() -> None:
    rows_seen.clear()
    model = with_body(lambda body, hidden, ids: hidden)
    model.body.register_forward_hook(named_hook)
    assert_exact(step_with(), model, names=["body"])
    assert rows_seen == [ROWS, ROWS]
    model.body.linear.register_forward_hook(named_hook)
    assert reasons(run(step_with(), model, names=["body"]).seen) == [
        f"body: the hook {__name__}.named_hook on linear would see parts of a batch, without a graph"
    ]


class FakeDevice:
    """A device whose random numbers come from a generator of the host."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.restored = 0

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.restored += 1
        self.generator.set_state(state)


GPU = torch.device("cuda", 0)
FAKE = FakeDevice()
DRAWN: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {
    "torch": torch.rand,
    "numpy": lambda shape: torch.from_numpy(np.random.random(shape)),
    "python": lambda shape: torch.tensor([[random.random()] for _ in range(shape[0])]),
    "device": lambda shape: torch.rand(shape, generator=FAKE.generator),
}


def dropping(draw: Callable[[tuple[int, ...]], torch.Tensor]) -> Mix:
    def mix(body: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return hidden * (draw(hidden.shape[:2]) >= body.dropout)[..., None] if body.dropout else hidden

    return mix


@pytest.mark.parametrize("is_restored", [True, False])
@pytest.mark.parametrize("source", DRAWN)
def test_a_part_draws_its_random_numbers_again(source: str, is_restored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference runs the same parts with a graph. Without restoring, the second draw is noticed."""

    def seed() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        FAKE.generator.manual_seed(1)

    model = with_body(dropping(DRAWN[source]))
    if source == "device":
        monkeypatch.setattr(torch, "get_device_module", {GPU: FAKE}.get)
        monkeypatch.setattr(ModuleCall, "devices", lambda self: [GPU])
    reference = copy.deepcopy(model)
    backbones = in_parts(PART, ["body"])
    seed()
    with backbones.cut(model) as seen:
        loss = row_models.supcon(model(input_ids=IDS), CLASSES)
        if not is_restored:
            monkeypatch.setattr(RandomState, "restore", lambda self: None)
            with pytest.raises(DependentRowsError, match="a part that was run again gave other values"):
                loss.backward()
            return
        loss.backward()
    assert seen.cut == 1
    seed()
    parts = [reference.body(input_ids=IDS[start : start + PART]) for start in range(0, ROWS, PART)]
    expected = row_models.supcon(reference.head(torch.cat(parts).mean(1)), CLASSES)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=0, atol=FLOAT64)
    of_reference = dict(reference.named_parameters())
    used = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert worst(used, {name: of_reference[name].grad for name in used}) <= FLOAT64


INPUTS = {name: row_models.causal(ROWS).inputs[name] for name in ("input_ids", "attention_mask")}


def _loss(model: nn.Module, **inputs: Any) -> torch.Tensor:
    outputs = model(**{**INPUTS, "use_cache": False, **inputs})
    return row_models.supcon(row_models.features(outputs), CLASSES)


def _plain(model: nn.Module) -> torch.Tensor:
    return backward(_loss(model))


def _two_backward(model: nn.Module) -> torch.Tensor:
    outputs = row_models.features(model(**INPUTS, use_cache=False))
    one, two = row_models.supcon(outputs, CLASSES), row_models.hard(outputs, CLASSES)
    one.backward(retain_graph=True)
    two.backward()
    return one + two


def _to_inputs(model: nn.Module) -> torch.Tensor:
    """The gradient of the inputs alone, as PGD takes it, which must not touch that of the weights."""
    embeddings = model.get_input_embeddings()(INPUTS["input_ids"]).detach().requires_grad_()
    loss = _loss(model, input_ids=None, inputs_embeds=embeddings)
    (gradient,) = torch.autograd.grad(loss, embeddings)
    assert all(p.grad is None for p in model.parameters())
    moved = embeddings.detach() + gradient.sign() * 0.1
    attacked = _loss(model, input_ids=None, inputs_embeds=moved.requires_grad_())
    attacked.backward()
    return loss + attacked + gradient.abs().sum() + moved.grad.abs().sum()


def _square(model: nn.Module) -> torch.Tensor:
    """As many columns as rows, and one row of positions for all."""
    inputs = {name: value[:, :ROWS] for name, value in INPUTS.items()}
    return backward(_loss(model, **inputs, position_ids=torch.arange(ROWS)[None] + 1))


def _generating(model: nn.Module) -> torch.Tensor:
    """Text that is generated within the step, which is never cut."""
    model.eval()
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = model.generate(**INPUTS, **settings)
    model.train()
    return backward(_loss(model, input_ids=text, attention_mask=torch.ones_like(text))) + text.sum()


def _under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _loss(model)
    return backward(loss).float()


def _llama() -> Any:
    return row_models.build("llama-tied")


def _checkpointed(*, use_reentrant: bool) -> Any:
    model = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


def _lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def _four_bits() -> Any:
    model = row_models.build("llama-tied").float()
    for layer in model.model.layers:
        linear = layer.self_attn.q_proj
        quantized = bitsandbytes.nn.Linear4bit(32, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        weights = bitsandbytes.nn.Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4")
        quantized.weight = weights
        layer.self_attn.q_proj = quantized.to("cpu")
    return _lora(model)


def _partly_frozen() -> Any:
    model = _llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def _compiled(backend: str) -> Callable[[nn.Module], torch.Tensor]:
    def step(model: nn.Module) -> torch.Tensor:
        torch._dynamo.reset()
        return _plain(torch.compile(model, backend=backend))  # type: ignore[arg-type]

    return step


INTERPLAY: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], torch.Tensor], float]] = {
    "two backward passes through one graph": (_llama, _two_backward, FLOAT64),
    "gradient of the inputs alone": (_llama, _to_inputs, FLOAT64),
    "as many columns as rows": (_llama, _square, FLOAT64),
    "generation in the step": (_llama, _generating, FLOAT64),
    "checkpointing": (lambda: _checkpointed(use_reentrant=False), _plain, FLOAT64),
    "reentrant checkpointing": (lambda: _checkpointed(use_reentrant=True), _plain, FLOAT64),
    "lora": (lambda: _lora(_llama()), _plain, FLOAT64),
    "four bits": (_four_bits, _plain, 1e-5),  # float32
    "frozen layers": (_partly_frozen, _plain, FLOAT64),
    "compiled": (_llama, _compiled("eager"), FLOAT64),
    "compiled ahead of time": (_llama, _compiled("aot_eager"), FLOAT64),
    "bf16 autocast": (lambda: _llama().float(), _under_autocast, 0.1),  # 8 bits, other products per part
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of 5.23, for the old names
@pytest.mark.parametrize("name", INTERPLAY)
def test_exact_together_with(name: str) -> None:
    build, step, tolerance = INTERPLAY[name]
    assert_exact(step, build(), tolerance)


def _moved(change: Callable[[torch.Tensor], object]) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        loss = _loss(model)
        with torch.no_grad():
            change(model.model.layers[1].mlp.up_proj.weight)
        loss.backward()

    return step


def _second_derivative(model: Any) -> None:
    torch.autograd.grad(_loss(model), list(model.parameters()), create_graph=True)


def _shared(model: Any) -> None:
    hidden, shared = model.body(input_ids=IDS)
    (hidden.sum() + shared.square().sum()).backward()


BACKWARD: dict[str, tuple[Callable[[Any], None], str]] = {
    "a weight changed": (
        _moved(lambda weight: weight.add_(0.1)),
        "layers.1.mlp.up_proj.weight was changed between the forward and the backward pass, so that parts would be run "
        "again with other weights",
    ),
    "a weight changed through .data": (
        _moved(lambda weight: weight.data.add_(0.1)),
        "a part that was run again gave other values: a weight, a buffer or a generator changed between the forward "
        "and the backward pass",
    ),
    "second derivative": (
        _second_derivative,
        "the gradient itself is differentiated (create_graph=True), and parts have no second derivative",
    ),
    "what all rows share": (
        _shared,
        "the loss uses an output of shape (8, 8) that all rows share, whose gradient parts cannot pass on",
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_pass_that_would_be_wrong_is_refused(name: str) -> None:
    step, message = BACKWARD[name]
    model = with_body(lambda body, hidden, ids: (hidden, body.linear.weight * 2)) if step is _shared else _llama()
    names = ["body"] if step is _shared else []
    with in_parts(PART, names).cut(model) as seen, pytest.raises(DependentRowsError) as error:
        step(model)
    assert seen.cut == 1
    assert str(error.value).removeprefix("model.") == message


OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class FailingAt(TorchDispatchMode):
    """Run out of memory at one operation, counted from 0."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.count = place, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.place + 1:
            raise torch.OutOfMemoryError(OUT)
        return func(*args, **(kwargs or {}))


class Halving:
    """Backbones whose parts halve, and what failed."""

    def __init__(self, model: nn.Module, step: Callable[[nn.Module], torch.Tensor], names: Sequence[str] = ()) -> None:
        self.rows = 4
        self.failed: list[tuple[int, int | None]] = []
        self.model, self.step = model, step
        self.backbones = Backbones(names, Size(lambda columns: self.rows, self._fail))
        for _ in range(2):  # checked now, and again in the second step
            self.run()

    def _fail(self, rows: int, columns: int | None, seconds: float) -> None:
        assert seconds > 0
        self.rows = max(1, rows // 2)
        self.failed.append((rows, columns))

    def run(self, place: int = 10**9) -> tuple[dict[str, torch.Tensor], int]:
        """Return the gradients of a step with an error at one operation, and how many operations it had."""
        self.rows = 4
        self.failed.clear()
        self.model.zero_grad()
        torch.manual_seed(1)
        with self.backbones.cut(self.model) as seen, FailingAt(place) as mode:
            self.step(self.model)
        assert seen.cut > 0
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}, mode.count


def _stepping(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    batch = ARCHITECTURES[name].batch(ROWS)
    return row_models.build(name), lambda model: STEPS["supcon"](model, batch)


@pytest.mark.parametrize(
    ("name", "stride"), slow_except([("bert", 211)], [("bert", 211), ("bert", 7), ("llama-tied", 7)])
)
def test_out_of_memory_in_a_part_is_exact_on_the_spot(name: str, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones_module, "CHECKED_STEPS", 0)
    halving = Halving(*_stepping(name))
    expected, count = halving.run()
    exact = 0
    places = range(0, count, stride)
    for place in places:
        try:
            found, _ = halving.run(place)
        except torch.OutOfMemoryError:  # in the head, in the loss, or where parts are joined
            assert not halving.failed
            continue
        exact += 1
        assert halving.failed in ([(4, row_models.COLUMNS)], [(3, row_models.COLUMNS)])
        assert worst(found, expected) <= FLOAT64
    assert exact > 0.75 * len(places)


class Failing:
    """A body that runs out of memory so many times, and counts what of its failed parts is alive when it runs."""

    def __init__(self, where: str) -> None:
        self.where, self.left = where, 0
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.counts: set[int] = set()

    def fail(self, *args: Any) -> None:
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError(f"{OUT}\nGPU 0 has")

    def mix(self, body: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.counts.add(sum(reference() is not None for reference in self.alive))
        self.alive.append(weakref.ref(hidden))
        if self.where == "forward":
            self.fail()
        elif hidden.requires_grad:
            hidden.register_hook(self.fail)
        return hidden * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_of_a_failed_part_is_alive_when_it_runs_again_and_one_row_is_raised(where: str) -> None:
    failing = Failing(where)
    halving = Halving(with_body(failing.mix), step_with(), ["body"])
    expected, _ = halving.run()
    failing.alive.clear()
    failing.counts.clear()
    failing.left = 1
    gc.disable()  # what a later collection frees may be too late
    try:
        found, _ = halving.run()
    finally:
        gc.enable()
    assert (failing.left, len(halving.failed), failing.counts) == (0, 1, {0})
    assert worst(found, expected) <= FLOAT64
    failing.left = 10**9
    with pytest.raises(PartsFailedError) as error:
        halving.run()
    assert (error.value.rows, error.value.columns, str(error.value)) == (1, row_models.COLUMNS, OUT)
    assert [rows for rows, _ in halving.failed] == [4, 2]
