"""The rows of a batch in parts: losses and gradients of the whole batch, and a refusal where they would not be."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes
import numpy as np
import pytest
import row_models
import torch
from row_models import ARCHITECTURES, ROWS, STEPS, TRAINED, WORDS
from torch import nn
from torch.nn import functional

import tiny
from hf_memopt.devices.random_state import RandomState
from hf_memopt.techniques.microbatching.backbones import Backbones, CutStep
from hf_memopt.techniques.microbatching.microbatch import MicrobatchCallback
from hf_memopt.techniques.microbatching.row_check import DependentRowsError, ModuleCall, check_rows
from hf_memopt.techniques.microbatching.rows_in_parts import Size
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
    step: Callable[[nn.Module], torch.Tensor],
    model: nn.Module,
    tolerance: float = FLOAT64,
    names: Sequence[str] = (),
) -> Outcome:
    """Hold a step in parts against the same step uncut."""
    whole, parts = run(step, model, 99, names), run(step, model, PART, names)
    assert parts.seen.cut > 0, parts.seen.reasons
    assert float((whole.loss - parts.loss).abs()) <= tolerance * max(1.0, float(whole.loss.abs()))
    assert worst(parts.gradients, whole.gradients) <= tolerance
    return parts


# ---- Oracle ---------------------------------------------------------------------------------------------------------

QUICK = ("bert", "llama-tied", "mixtral", "mamba", "t5", "vit", "wav2vec2", "clip")
QUICK_STEPS = ("own", "supcon", "attack")


def _marks(name: str, step: str) -> list[Any]:
    return [] if name in QUICK and step in QUICK_STEPS else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "step"),
    [pytest.param(name, step, marks=_marks(name, step)) for name in ARCHITECTURES for step in STEPS],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(name: str, step: str) -> None:
    architecture = ARCHITECTURES[name]
    batch = architecture.batch(ROWS)
    assert_exact(lambda model: STEPS[step](model, batch), row_models.build(name), architecture.tolerance)


@pytest.mark.parametrize(("name", "loss"), TRAINED)
def test_accumulation_under_the_trainer(name: str, loss: str, tmp_path: Path) -> None:
    whole = row_models.train(name, loss, tmp_path)
    callback = MicrobatchCallback(max_examples=2)
    parts = row_models.train(name, loss, tmp_path, callback)
    assert callback.tally.cut_steps == 2
    assert tiny.largest_difference(whole.model, parts.model) <= FLOAT64


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_pair(folder, row_models.__file__, str(folder), timeout_seconds=120)


@pytest.mark.parametrize(("name", "loss"), TRAINED)
def test_accumulation_in_two_processes(name: str, loss: str, ranks: list[dict[str, Any]]) -> None:
    for difference, cut_steps in (found[f"{name}: {loss}"] for found in ranks):
        assert difference <= FLOAT64
        assert cut_steps == 2


# ---- What depends on other rows, or on how often it runs ------------------------------------------------------------

Mix = Callable[[Any, torch.Tensor, torch.Tensor], Any]


class Body(nn.Module):
    """A backbone that does with its rows what a test says: ``mix`` gets it, the hidden states and the ids."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.words, self.linear, self.mix = nn.Embedding(WORDS, 8), nn.Linear(8, 8), mix
        self.norm = nn.BatchNorm1d(10)
        self.scaled = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.p = 0, 0.5
        self.seen: list[Any] = []
        self.last: dict[str, Any] = {}

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


def step_with(**inputs: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    """Return a step whose loss compares rows."""

    def step(model: nn.Module) -> torch.Tensor:
        loss = row_models.supcon(model(**{"input_ids": IDS, **inputs}), CLASSES)
        loss.backward()
        return loss

    return step


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


def trimmed(body: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return hidden[:, : int(ids.ne(0).any(0).nonzero().max()) + 1]


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
    "the longest row": (trimmed, "parts of its output 0 of shape (7, 10, 8) have shapes that do not join"),
    "no rows": (lambda body, hidden, ids: body.words.weight[:7, None], "none of its outputs has rows"),
    "permutation": (lambda body, hidden, ids: hidden + hidden[torch.randperm(len(hidden))], DRAWS),
    "augmentation": (masked_by_numpy, DRAWS),
    "one number for all rows": (lambda body, hidden, ids: hidden * random.random(), DRAWS),
    "spectral norm": (
        lambda body, hidden, ids: body.scaled(hidden),
        CHANGES.format("scaled.parametrizations.weight.0._u"),
    ),
    "buffer in place": (doing(lambda body, hidden: body.count.add_(1)), CHANGES.format("count")),
    "buffer": (doing(lambda body, hidden: setattr(body, "count", body.count + 1)), CHANGES.format("count")),
    "number": (doing(lambda body, hidden: setattr(body, "calls", body.calls + 1)), CHANGES.format("calls")),
    "tensor": (doing(lambda body, hidden: setattr(body, "kept", hidden)), CHANGES.format("kept")),
    "list": (doing(lambda body, hidden: body.seen.append(1)), CHANGES.format("seen")),
    "entry of a dict": (doing(lambda body, hidden: body.last.update(x=hidden)), CHANGES.format("last")),
}


def reasons(seen: CutStep) -> list[str]:
    """Return why calls ran whole, without the sizes of errors."""
    return [re.sub(r"[\d.]+e[+-]\d+", "#", reason) for reason in seen.reasons]


def drawn() -> Any:
    """Return the states of all generators."""
    return repr((torch.get_rng_state().tolist(), np.random.get_state(legacy=False), random.getstate()))


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
        finished.append((outcome, own, drawn()))
    (whole, expected, numbers), (parts, own, numbers_of_parts) = finished
    assert (parts.seen.cut, reasons(parts.seen)) == (0, [f"body: {reason}"])
    assert torch.equal(whole.loss, parts.loss)
    assert worst(parts.gradients, whole.gradients) == 0.0
    assert own == expected
    assert numbers_of_parts == numbers
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[key]), key


@pytest.mark.parametrize("groups", [[0, 0, 1, 1, 2, 2, 3], [0, 0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 4, 5, 6]])
def test_groups_are_refused_though_they_come_apart_at_no_cut_or_have_one_row_each(groups: list[int]) -> None:
    """The check gives rows the content of others, and their group with it."""
    outcome = run(step_with(groups=torch.tensor(groups)), with_body(grouped), names=["body"])
    assert outcome.seen.cut == 0
    assert reasons(outcome.seen)[0].startswith("body: rows depend on each other: ")


def test_a_check_leaves_no_trace() -> None:
    model = with_body(lambda body, hidden, ids: functional.dropout(hidden, body.p))
    before, numbers = copy.deepcopy(model.state_dict()), drawn()
    call = ModuleCall(model.body, model.body.forward, (), {"input_ids": IDS})
    assert check_rows(call, PART) == ((0,), (0,))
    assert (model.body.p, drawn(), model.body.training) == (0.5, numbers, True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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


def test_a_cache_is_refused_with_advice() -> None:
    batch = row_models.causal(ROWS)
    inputs = {**batch.inputs, "use_cache": True}

    def step(model: nn.Module) -> torch.Tensor:
        loss = row_models.supcon(model(**inputs).logits[:, -1], batch.classes)
        loss.backward()
        return loss

    outcome = run(step, row_models.build("llama-tied"))
    assert list(outcome.seen.reasons) == [
        f"{name}: its output {place} is a DynamicCache, which has no rows: pass use_cache=False"
        for name, place in (("LlamaForCausalLM", 1), ("model", 1))
    ]


# ---- What is exact --------------------------------------------------------------------------------------------------


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
        return hidden * (draw(hidden.shape[:2]) >= body.p)[..., None] if body.p else hidden

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


def test_the_devices_are_those_of_keywords_and_weights() -> None:
    class OnGpu(torch.Tensor):
        device = GPU

    model = with_body(lambda body, hidden, ids: hidden)
    for inputs in ({"input_ids": IDS.as_subclass(OnGpu)}, {"input_ids": IDS}):
        assert ModuleCall(model.body, model.body.forward, (), inputs).devices() == [GPU]
        model.body.words.weight = nn.Parameter(model.body.words.weight.detach().as_subclass(OnGpu))


INPUTS = {name: row_models.causal(ROWS).inputs[name] for name in ("input_ids", "attention_mask")}


def _loss(model: nn.Module, **inputs: Any) -> torch.Tensor:
    outputs = model(**{**INPUTS, "use_cache": False, **inputs})
    return row_models.supcon(row_models.features(outputs), CLASSES)


def _plain(model: nn.Module) -> torch.Tensor:
    loss = _loss(model)
    loss.backward()
    return loss


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
    loss = _loss(model, **inputs, position_ids=torch.arange(ROWS)[None] + 1)
    loss.backward()
    return loss


def _generating(model: nn.Module) -> torch.Tensor:
    """Text that is generated within the step, which is never cut."""
    model.eval()
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text = model.generate(**INPUTS, **settings)
    model.train()
    loss = _loss(model, input_ids=text, attention_mask=torch.ones_like(text))
    loss.backward()
    return loss + text.sum()


def _under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _loss(model)
    loss.backward()
    return loss.float()


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
