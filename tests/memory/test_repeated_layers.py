"""A trace of which the identical layers were repeated is the trace of the whole model, in everything a replay reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from slow_cases import slow_except
from torch import nn
from transformers import PretrainedConfig

from hf_memopt.binding import versions as compat
from hf_memopt.binding.input_gradients import drop_input_gradients
from hf_memopt.memory.cuda.chip import Chip
from hf_memopt.memory.estimation import estimate
from hf_memopt.memory.models.config_files import known_models
from hf_memopt.memory.models.loading import load_model
from hf_memopt.memory.recording import trace_cache
from hf_memopt.memory.recording.identical_layers import find_runs
from hf_memopt.memory.recording.repeated_layers import RepeatedLayers, runs_to_cut, state_kept
from hf_memopt.memory.recording.step_trace import RecordedPass, StepTrace
from hf_memopt.memory.recording.trace_cache import Shape, record_or_reuse
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.step_time.operations import merged
from hf_memopt.techniques.checkpointing.policies import checkpoint_layers
from hf_memopt.techniques.freezing.freezing import freeze

pytestmark = [
    # the deprecated name of activation checkpointing, asked for by peft; seen in peft 0.18 with transformers 5.23
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
POSITIONS = {"max_position_embeddings": 64}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert": lambda: transformers.BertConfig(**SMALL, **POSITIONS, num_hidden_layers=9),
    "llama": lambda: transformers.LlamaConfig(
        **SMALL, **POSITIONS, num_hidden_layers=8, num_key_value_heads=1, attention_dropout=0.1
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=7, n_head=2),
    "t5": lambda: transformers.T5Config(
        vocab_size=100,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=9,
        num_decoder_layers=8,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=100,
        d_model=32,
        encoder_layers=7,
        decoder_layers=8,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
    ),
    "deberta": lambda: transformers.DebertaV2Config(
        **SMALL,
        **POSITIONS,
        num_hidden_layers=8,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
    ),
    # sliding and full attention in turn: one period of layers is a unit
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL,
        **POSITIONS,
        num_hidden_layers=16,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 8,
    ),
    "vit": lambda: transformers.ViTConfig(
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        num_hidden_layers=8,
        image_size=32,
        patch_size=8,
        architectures=["ViTForImageClassification"],
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "eval_batch_size": 3},
    "bf16": {"precision": "bf16", "gradient_accumulation_steps": 2, "eval_batch_size": 2},
    "no cache": {"precision": "bf16", "autocast_cache": False},
    "checkpointing": {"precision": "bf16", "checkpointing": True, "eval_batch_size": 2},
    "reentrant": {"precision": "fp32", "checkpointing": {"use_reentrant": True}},
    "every second layer": {"precision": "bf16", "checkpointing": {"every_n_layers": 2}},
    "gradient release": {"precision": "bf16", "gradient_release": True, "max_grad_norm": 0.0},
    "release and checkpointing": {"checkpointing": True, "optim": "adalomo", "precision": "fp32"},
    "micro-batches": {"precision": "fp16", "micro_batch_size": 1},
    "label smoothing, eager": {"label_smoothing_factor": 0.1, "attn_implementation": "eager", "precision": "bf16"},
    "hand-written loop": {"loop": "manual", "precision": "bf16", "gradient_accumulation_steps": 2},
    "16-bit weights": {"weights_dtype": "bfloat16", "precision": "fp32", "checkpointing": True},
}


def facts_of(trace: StepTrace) -> dict[str, Any]:
    """Return everything that a replay or an estimate reads from a trace."""
    tracker = trace.tracker
    numbers = range(len(tracker.sizes))

    def of_pass(part: RecordedPass | None) -> Any:
        if part is None:
            return None
        # the sequence numbers themselves depend on what ran in the process before
        loss = [number for number in numbers if tracker.sequences[number] in part.logits_sequences]
        whole = part.start, part.forward_end, part.end, part.logits, part.logits_event
        return *whole, part.outputs, part.releases, loss

    return {
        "events": tracker.events,
        "sizes": tracker.sizes,
        "allocated_at": tracker.allocated_at,
        "recomputed": tracker.recomputed,
        "modules": [tracker.module_of(number) for number in numbers],
        "weights": trace.weights,
        "inputs": (trace.inputs, trace.evaluation_inputs),
        "gradients": trace.gradients,
        "passes": [of_pass(part) for part in (*trace.micro_batches, trace.evaluation)],
        "flops": trace.flops,
        "operations": [merged(part) for part in trace.operations],
        "notes": trace.notes,
        "host bytes": trace.host_bytes,
    }


def recorded(model: Any, settings: StepSettings, *, whole: bool) -> tuple[StepTrace, bool]:
    """Return the trace of a model and whether layers were repeated in it; ``whole`` records every layer."""
    repeated = []
    original = trace_cache._of_some_layers

    def spy(*args: Any) -> StepTrace | None:
        found = None if whole else original(*args)
        repeated.append(found is not None)
        return found

    weights, attention = settings.weights_dtype, settings.attn_implementation
    loaded = load_model(model, weights_dtype=weights, attn_implementation=attention)
    of_images = hasattr(getattr(loaded.model, "config", None), "image_size")
    length = 24 if not of_images else None
    trace_cache.forget_traces()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_cache, "_of_some_layers", spy)
        step = record_or_reuse(loaded, settings, Shape(2, length), Chip.of((8, 0)))
    trace_cache.forget_traces()
    return step.trace, repeated[0]


def assert_same(model: Any, settings: StepSettings, *, repeats: bool = True) -> None:
    trace, repeated = recorded(model, settings, whole=False)
    expected, _ = recorded(model, settings, whole=True)
    assert repeated == repeats
    found, wanted = facts_of(trace), facts_of(expected)
    for name, value in wanted.items():
        assert found[name] == value, name


FAST = ("bf16", "checkpointing", "every second layer", "release and checkpointing", "micro-batches")


@pytest.mark.parametrize("settings", slow_except(FAST, SETTINGS))
@pytest.mark.parametrize("name", slow_except(("bert",), ("bert", "t5", "llama")))
def test_the_trace_is_that_of_the_whole_model(name: str, settings: str) -> None:
    # of 8 or 9 layers there are no six pairs; transformers 5.8 checkpoints all of them
    by_two = settings == "every second layer" and compat.can_offload_checkpoints()
    assert_same(CONFIGS[name](), StepSettings(**SETTINGS[settings]), repeats=not by_two)


@pytest.mark.parametrize("settings", slow_except(("checkpointing",), ("checkpointing", "bf16", "gradient release")))
@pytest.mark.parametrize("name", slow_except(("gpt2",), ("gpt2", "bart", "deberta", "gemma3", "vit")))
def test_the_trace_of_other_architectures(name: str, settings: str) -> None:
    assert_same(CONFIGS[name](), StepSettings(**SETTINGS[settings]))


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_the_trace_with_other_kernels(attention: str) -> None:
    assert_same(CONFIGS["llama"](), StepSettings(precision="bf16", attn_implementation=attention))


def top_half(model: nn.Module) -> None:
    """Train the layers from the seventh on, and the head."""
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.layers?\.(\d+)\.", name)
        parameter.requires_grad_("embed" not in name and (layer is None or int(layer[1]) >= 7))


def adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.1))


PREPARED: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "a frozen body": (partial(freeze, patterns=("base",)), drop_input_gradients),
    "frozen embeddings": (partial(freeze, patterns=("embeddings",)),),
    "a frozen half": (top_half,),
    "LoRA": (adapters,),
    "every second layer checkpointed": (partial(checkpoint_layers, policy="every_2"),),
    "the first layers checkpointed": (partial(checkpoint_layers, policy="first_7"),),
    "products kept": (partial(checkpoint_layers, policy="selective"),),
}


@pytest.mark.parametrize("checkpointing", slow_except((True,), (False, True)))
@pytest.mark.parametrize("name", slow_except(("a frozen half", "LoRA", "products kept"), PREPARED))
def test_the_trace_of_a_prepared_model(name: str, checkpointing: bool) -> None:
    config = transformers.BertConfig(**SMALL, **POSITIONS, num_hidden_layers=14)
    settings = StepSettings(precision="bf16", checkpointing=checkpointing, prepare=PREPARED[name])
    assert_same(config, settings)


def test_the_trace_of_a_quantised_model() -> None:
    pytest.importorskip("bitsandbytes")
    config = CONFIGS["llama"]()
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    adapt = partial(_adapt, targets=["q_proj", "v_proj"])
    assert_same(config, StepSettings(precision="bf16", checkpointing=True, prepare=(adapt,)))


def _adapt(model: nn.Module, targets: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=targets))


# ---- Where every layer has to be recorded ---------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer whose forward pass may depend on its number."""

    def __init__(self, number: int, from_layer: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.layer_idx, self.from_layer = number, from_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.from_layer is not None and self.layer_idx >= self.from_layer:
            x = x.sigmoid()
        return x + self.linear(x)


class Model(transformers.PreTrainedModel):
    """Layers one after the other; ``run`` may do it in another way."""

    config_class = transformers.BertConfig

    def __init__(self, layers: list[nn.Module], run: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__(transformers.BertConfig(num_hidden_layers=len(layers), vocab_size=10))
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(layers)
        self.run = run

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        if self.run is not None:
            return {"loss": self.run(self, x).mean()}
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.mean()}


def plain_layers() -> list[nn.Module]:
    return [Layer(number) for number in range(9)]


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in (*model.layers, *model.layers):
        x = layer(x)
    return x


def last_is_special(model: Any, x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x)
        if number == model.config.num_hidden_layers - 1:
            x = x.sigmoid()
    return x


def by_number(model: Any, x: torch.Tensor) -> torch.Tensor:
    for number in range(model.config.num_hidden_layers):
        x = model.layers[number](x)
    return x


def one_result_of_each(model: Any, x: torch.Tensor) -> torch.Tensor:
    results = [x]
    for layer in model.layers:
        results.append(layer(results[-1]))
    return torch.stack(results[::2])


def batch_of_ids(*_: Any, batch_size: int, **__: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(batch_size, 4, dtype=torch.int64, device="meta")}


UNEQUAL: dict[str, Callable[[], nn.Module]] = {
    "a layer of another width": lambda: Model([*plain_layers()[:5], nn.Linear(8, 8), *plain_layers()[:3]]),
    "a threshold in the layers": lambda: Model([Layer(number, 6) for number in range(9)]),
    "every layer twice": lambda: Model(plain_layers(), twice),
    "a question for the last number": lambda: Model(plain_layers(), last_is_special),
    "layers by number": lambda: Model(plain_layers(), by_number),
    "results of all layers": lambda: Model(plain_layers(), one_result_of_each),
    "one layer in all places": lambda: Model([Layer(0)] * 9),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_every_layer_is_recorded_where_they_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "example_batch", batch_of_ids)
    assert_same(UNEQUAL[name](), StepSettings(precision="fp32"), repeats=False)


def test_plain_layers_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "example_batch", batch_of_ids)
    assert_same(Model(plain_layers()), StepSettings(precision="fp32"))


def test_hidden_states_of_every_layer_need_every_layer() -> None:
    config = CONFIGS["llama"]()
    config.output_hidden_states = True
    assert_same(config, StepSettings(precision="fp32", eval_batch_size=2), repeats=False)


@pytest.mark.skipif(not compat.can_offload_checkpoints(), reason="transformers 5.8 does not offload activations")
@pytest.mark.parametrize("name", slow_except(("llama",), ("llama", "bert", "t5")))
def test_the_trace_with_activations_on_the_host(name: str) -> None:
    offload = {"use_reentrant": False, "offload": True}
    settings = StepSettings(precision="bf16", checkpointing=offload, gradient_accumulation_steps=2, eval_batch_size=2)
    assert_same(CONFIGS[name](), settings)


# ---- The parts ------------------------------------------------------------------------------------------------------


def test_runs_of_a_half_frozen_model() -> None:
    model = load_model(transformers.BertConfig(**SMALL, num_hidden_layers=14)).model
    top_half(model)
    runs = [(run.first, run.period, run.units, run.dropped) for run in find_runs(model)]
    assert runs == [(0, 1, 7, range(3, 5)), (7, 1, 7, range(10, 12))]


def test_a_unit_is_a_period_of_the_pattern() -> None:
    (run,) = find_runs(load_model(CONFIGS["gemma3"]()).model)
    assert (run.period, run.units, run.dropped) == (2, 8, range(6, 12))
    assert [run.kept_unit(place) for place in range(5)] == [0, 1, 2, 6, 7]


def test_layers_with_other_hooks_are_not_the_same() -> None:
    model = load_model(CONFIGS["bert"]()).model
    assert find_runs(model)
    model.bert.encoder.layer[4].attention.register_forward_hook(lambda *_: None)
    assert not find_runs(model)


def test_a_cut_leaves_the_model_as_it_was() -> None:
    model = load_model(CONFIGS["bert"]()).model
    before = str(model), [id(module) for module in model.modules()], model.config.to_dict()
    layers = RepeatedLayers(model, runs_to_cut(model))
    with layers.cut(model, trace_cache.StorageTracker()):
        assert len(model.bert.encoder.layer) == 5
    assert (str(model), [id(module) for module in model.modules()], model.config.to_dict()) == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_the_state_of_modules_is_restored() -> None:
    module = nn.Linear(2, 2)
    with state_kept(module):
        module.cache = torch.empty(2)
        module.register_buffer("mask", torch.empty(2))
        module.register_forward_hook(lambda *_: None)
    assert not hasattr(module, "cache")
    assert not hasattr(module, "mask")
    assert not module._forward_hooks


# ---- The known models -----------------------------------------------------------------------------------------------


def long_models() -> list[str]:
    """Return one known name of each configuration of known models."""
    names: dict[str, str] = {}
    for name, facts in known_models().items():
        names.setdefault(repr((facts["model_type"], facts["task"], sorted(facts["config"].items(), key=str))), name)
    return list(names.values())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", long_models())
def test_estimates_of_known_models(name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if checkpointing and name.startswith("albert"):
        pytest.skip("transformers has no checkpointing for ALBERT")
    lengths: dict[str, Any] = {} if name.startswith("vit") else {"seq_len": 64}
    options = {"precision": "bf16", "checkpointing": checkpointing, "eval_batch_size": 2, "gpu": "RTX 3060 12GB"}
    trace_cache.forget_traces()
    found = estimate(name, batch_size=2, **lengths, **options)
    trace_cache.forget_traces()
    monkeypatch.setattr(trace_cache, "_of_some_layers", lambda *_: None)
    expected = estimate(name, batch_size=2, **lengths, **options)
    assert found.to_json() == expected.to_json()
    assert (found.timeline.components == expected.timeline.components).all()
    assert (found.timeline.reserved == expected.timeline.reserved).all()
    assert (found.timeline.phases, found.timeline.steps) == (expected.timeline.phases, expected.timeline.steps)
