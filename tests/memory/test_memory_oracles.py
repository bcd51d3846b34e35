"""The recorded step against four oracles: real CPU tensors, the real CPU allocator, real autocast, torch's MemTracker.

The first three run the very model on real memory. No oracle shares code with the tracker except the first, which is
the tracker itself on real tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from host_semantics import HostSemantics
from slow_cases import slow_except
from torch.distributed._tools.mem_tracker import MemTracker  # private package: an oracle of this test only
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt import tile_layers
from hf_memopt.binding import versions as compat
from hf_memopt.memory.cuda import CudaSemantics, run_backward
from hf_memopt.memory.recording import StepTrace
from hf_memopt.memory.recording.passes import autocast_dtype
from hf_memopt.memory.recording.sessions import _prepared
from hf_memopt.memory.recording.step import record_step, recording
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.tracking import StorageTracker

pytestmark = [
    # the deprecated name of activation checkpointing, asked for by peft; seen in peft 0.18 with transformers 5.23
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # MemTracker skips modules that a model makes and drops within forward, such as a CrossEntropyLoss
    pytest.mark.filterwarnings("ignore:Module is None:UserWarning"),
    # torch 2.13 says so whenever the state of oneDNN is read
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
    # peft corrects the option by itself for GPT-2's transposed linears
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

VOCABULARY, BATCH, SEQ = 100, 4, 24
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**TEXT, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
ENCODER = {**TEXT, "intermediate_size": 64, "max_position_embeddings": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", ENCODER),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "attention_dropout": 0.1}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**VIT, "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    ),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "distilbert": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2},
    ),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**ENCODER, "pad_token_id": 0}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "head_dim": 8}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**TEXT, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
}
WIDE = {"intermediate_size": 512, "num_hidden_layers": 1}
SINGLE = {"t5": ("eager",), "deberta-v2": ("eager",)}  # no sdpa with dropout to compare


def build(family: str, device: str, attention: str = "eager", **changed: Any) -> Any:
    """Return a tiny model of a family in training mode, on a device, its weights drawn from one seed."""
    head, config, settings = MODELS[family]
    configuration = getattr(transformers, config)(**{**settings, **changed})
    configuration._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device(device):
        return getattr(transformers, head)(configuration).train()


def batch(family: str, device: str) -> dict[str, torch.Tensor]:
    """Return a batch whose second row is padded, of the same values for every device."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCABULARY, (BATCH, SEQ), generator=draw)
    if family == "vit":
        tensors = {"pixel_values": torch.rand(BATCH, 3, 32, 32, generator=draw)}
    else:
        mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
        mask[1, SEQ - 4 :] = 0
        tensors = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}
    if "Classification" in MODELS[family][0]:
        tensors["labels"] = torch.zeros(BATCH, dtype=torch.int64)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def checkpointed(model: Any, settings: StepSettings) -> Any:
    if settings.checkpointing:
        options = settings.checkpointing if isinstance(settings.checkpointing, Mapping) else {}
        compat.enable_checkpointing(model, {"use_reentrant": False, **options})
    return model


class RealAutocast(HostSemantics):
    """Torch's own autocast of the CPU in place of the emulated one."""

    def __init__(self, settings: StepSettings, tracker: StorageTracker) -> None:
        super().__init__(tracker=tracker)
        self._real = {"dtype": autocast_dtype(settings.precision), "cache_enabled": settings.autocast_cache}

    @contextmanager
    def autocast_region(self) -> Iterator[None]:
        with torch.autocast("cpu", **self._real):
            yield


def record(
    family: str,
    device: str,
    settings: StepSettings,
    attention: str = "eager",
    *,
    cuda: bool = False,
    real_autocast: bool = False,
    prepare: Callable[[Any], Any] | None = None,
    evaluate: bool = False,
    **changed: Any,
) -> StepTrace:
    """Record a step on a device, with its own dropout, attention and autocast lists unless ``cuda``."""
    model = checkpointed(build(family, device, attention, **changed), settings)
    if prepare is not None:
        model = prepare(model) or model
    tracker = StorageTracker(device_type=device)
    semantics: CudaSemantics = (CudaSemantics if cuda else HostSemantics)(
        autocast=autocast_dtype(settings.precision), cache=settings.autocast_cache, tracker=tracker
    )
    if real_autocast:
        semantics = RealAutocast(settings, tracker)
    inputs = batch(family, device)
    return record_step(
        model,
        inputs,
        settings,
        tracker=tracker,
        semantics=semantics,
        evaluation_batch=inputs if evaluate else None,
    )


def peak_bytes(tracker: StorageTracker) -> int:
    """Return the most that is alive at once."""
    alive = peak = 0
    for _, delta in tracker.events:
        alive += delta
        peak = max(peak, alive)
    return peak


def sizes(tracker: StorageTracker) -> list[int]:
    """Return the deltas in order, less those of scalars and empty tensors.

    A fresh key-value cache is an empty tensor on real devices only; transformers below 5.23 makes the mask's least
    value a scalar there.
    """
    return [delta for _, delta in tracker.events if abs(delta) > 8]


def origins(tracker: StorageTracker) -> list[tuple[int, str]]:
    """Return size and module of every birth in order, less those of scalars."""
    return [(delta, tracker.module_of(number)) for number, delta in tracker.events if delta > 8]


def made(tracker: StorageTracker) -> list[int]:
    """Return the sizes of all births, sorted, less rotary angles, for which transformers below 5.23 leaves autocast."""
    return sorted(delta for delta, module in origins(tracker) if not module.endswith("rotary_emb"))


# ---- Real CPU tensors -----------------------------------------------------------------------------------------------

PAIRS = [
    (family, attention)
    for family in ("bert", "gpt2", "llama", "t5", "vit")
    for attention in SINGLE.get(family, ("eager", "sdpa"))
]
STEPS = {
    "fp32": StepSettings(precision="fp32", gradient_accumulation_steps=2),
    "bf16": StepSettings(precision="bf16"),
    "bf16, checkpointing": StepSettings(precision="bf16", checkpointing=True, gradient_accumulation_steps=2),
    "fp32, reentrant": StepSettings(precision="fp32", checkpointing={"use_reentrant": True}),
    "bf16, every second layer": StepSettings(precision="bf16", checkpointing={"every_n_layers": 2}),
}


@pytest.mark.parametrize("step", slow_except(("fp32", "bf16, checkpointing"), STEPS))
@pytest.mark.parametrize(("family", "attention"), PAIRS)
def test_meta_step_is_the_real_step_to_the_byte(family: str, attention: str, step: str) -> None:
    real = record(family, "cpu", STEPS[step], attention).tracker
    meta = record(family, "meta", STEPS[step], attention).tracker
    assert peak_bytes(meta) == peak_bytes(real)
    assert sizes(meta) == sizes(real)
    assert origins(meta) == origins(real)
    assert meta.flops == real.flops > 0


def freeze_first_layer(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "embed" in name or "wte" in name or "shared" in name or ".0." in name:
            parameter.requires_grad_(False)


def add_lora(model: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "vit"])
@pytest.mark.parametrize("prepare", [freeze_first_layer, add_lora])
def test_frozen_and_adapted_models_on_meta_are_the_real_ones(family: str, prepare: Callable[[Any], Any]) -> None:
    step = StepSettings(precision="bf16")
    real, meta = (record(family, device, step, prepare=prepare).tracker for device in ("cpu", "meta"))
    assert sizes(meta) == sizes(real)
    assert peak_bytes(meta) == peak_bytes(real)


def adapters_by_peft(model: Any, lora: Any, dtype: torch.dtype) -> Any:
    import peft

    task_types = {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "bert": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM"}
    if isinstance(lora, int):
        heads = ["classifier"] if model.config.model_type == "vit" else None
        task = task_types.get(model.config.model_type)
        lora = peft.LoraConfig(r=lora, target_modules="all-linear", task_type=task, modules_to_save=heads)
    return peft.get_peft_model(model.to(dtype), lora)


def adapters_by_settings(model: Any, lora: Any, dtype: torch.dtype) -> Any:
    return _prepared(model.to(dtype), StepSettings(lora=lora))


ADAPTED = [
    *((family, torch.float32, step) for family in ("bert", "gpt2", "llama", "t5", "vit") for step in ("fp32", "bf16")),
    # LayerNorm of 16-bit tensors keeps its statistics in 16 bits on the CPU, in float32 on CUDA and on meta
    *((family, torch.bfloat16, step) for family in ("llama", "t5") for step in ("bf16", "bf16, checkpointing")),
    ("llama", torch.bfloat16, "fp32, reentrant"),
]


@pytest.mark.parametrize("lora", [4, {"r": 2, "lora_dropout": 0.1}], ids=["rank", "configuration"])
@pytest.mark.parametrize(("family", "dtype", "step"), slow_except(ADAPTED[1::2], ADAPTED))
def test_adapters_of_the_settings_are_pefts_to_the_byte(family: str, dtype: torch.dtype, step: str, lora: Any) -> None:
    import peft

    if not isinstance(lora, int):
        lora = peft.LoraConfig(target_modules="all-linear", **lora)
    real = record(family, "cpu", STEPS[step], prepare=lambda model: adapters_by_peft(model, lora, dtype))
    meta = record(family, "meta", STEPS[step], prepare=lambda model: adapters_by_settings(model, lora, dtype))
    assert sizes(meta.tracker) == sizes(real.tracker)
    assert peak_bytes(meta.tracker) == peak_bytes(real.tracker)
    gradients = [[trace.tracker.sizes[number] for number in trace.gradients] for trace in (real, meta)]
    assert gradients[0] == gradients[1] != []


@pytest.mark.parametrize(
    ("family", "step"),
    [
        ("bert", StepSettings(precision="bf16", label_smoothing_factor=0.1)),
        ("gpt2", StepSettings(precision="fp32", label_smoothing_factor=0.1)),
        ("llama", StepSettings(precision="bf16", label_smoothing_factor=0.1)),
        ("bert", StepSettings(precision="fp16")),
        ("llama", StepSettings(precision="bf16", autocast_cache=False, checkpointing=True)),
        ("t5", StepSettings(precision="fp32", gradient_release=True, max_grad_norm=0)),
        ("gpt2", StepSettings(precision="fp32", checkpointing={"use_reentrant": True, "preserve_rng_state": False})),
        ("gpt2", StepSettings(precision="fp32", loop="manual", zero_grad_to_none=False)),
        ("t5", StepSettings(precision="bf16", loop="manual", gradient_accumulation_steps=2)),
    ],
)
def test_other_settings_on_meta_are_the_real_ones(family: str, step: StepSettings) -> None:
    real, meta = (record(family, device, step).tracker for device in ("cpu", "meta"))
    assert sizes(meta) == sizes(real)
    assert peak_bytes(meta) == peak_bytes(real)


def tiled(model: Any) -> None:
    """Run it in tiles, of which a real model compares the first before it is recorded."""
    tile_layers(model, 8)
    if not next(model.parameters()).is_meta:
        model(**batch(model.config.model_type, "cpu"))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "modernbert"])
def test_tiles_on_meta_are_the_real_ones(family: str, checkpointing: bool) -> None:
    step = StepSettings(precision="bf16", checkpointing=checkpointing)
    real, meta = (record(family, device, step, prepare=tiled, **WIDE).tracker for device in ("cpu", "meta"))
    assert sizes(meta) == sizes(real)
    assert peak_bytes(meta) == peak_bytes(real)
    whole = record(family, "meta", step, **WIDE).tracker
    assert peak_bytes(meta) < peak_bytes(whole)
    assert meta.flops == whole.flops if checkpointing else meta.flops > whole.flops


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "vit"])
def test_evaluation_on_meta_is_the_real_one(family: str) -> None:
    step = StepSettings(precision="bf16", eval_batch_size=BATCH)
    real, meta = (record(family, device, step, evaluate=True) for device in ("cpu", "meta"))
    assert sizes(meta.tracker) == sizes(real.tracker)
    assert meta.evaluation is not None
    assert real.evaluation is not None
    gathered = [[trace.tracker.sizes[n] for n in trace.evaluation.outputs] for trace in (meta, real)]  # type: ignore[union-attr]
    assert gathered[0] == gathered[1] != []


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "vit"])
@pytest.mark.parametrize("checkpointing", [False, {"use_reentrant": True}], ids=["", "checkpointing"])
def test_cudas_dropout_and_autocast_on_meta_are_those_on_real_tensors(family: str, checkpointing: Any) -> None:
    """The CUDA lists and the byte mask run on a CPU too; only its attention kernels and float16 softmax do not."""
    step = StepSettings(precision="bf16", checkpointing=checkpointing)
    real, meta = (record(family, device, step, cuda=True).tracker for device in ("cpu", "meta"))
    assert sizes(meta) == sizes(real)
    assert peak_bytes(meta) == peak_bytes(real)


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_known_exception_sdpa_without_dropout_takes_a_kernel_of_the_cpu(family: str) -> None:
    """A fused kernel of the CPU, which meta does not pick: the one case in which a CPU is no oracle for meta."""
    without = {"attention_dropout": 0.0} if family == "llama" else {"attention_probs_dropout_prob": 0.0}
    fused = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    for device, picked in (("cpu", True), ("meta", False)):
        with Operators() as operators:
            tracker = record(family, device, StepSettings(precision="fp32"), "sdpa", **without).tracker
        assert (fused in operators.seen) == picked
        if picked:
            real_peak = peak_bytes(tracker)
    assert peak_bytes(tracker) > real_peak  # the probabilities that the fused kernel never writes
    with Operators() as operators:
        record(family, "cpu", StepSettings(precision="fp32"), "sdpa")
    assert fused not in operators.seen


# ---- The real CPU allocator -----------------------------------------------------------------------------------------


def allocator_peak(family: str, step: StepSettings, attention: str, **size: int) -> int:
    """Return the peak of torch's CPU allocator in a plain training step, without any of our modes."""
    model = checkpointed(build(family, "cpu", attention, **size), step)
    inputs = batch(family, "cpu")
    before = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers(), *inputs.values())}
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            dtype = autocast_dtype(step.precision)
            with torch.autocast("cpu", enabled=dtype is not None, dtype=dtype, cache_enabled=step.autocast_cache):
                output = model(**inputs)
            logits = output.logits.float() if dtype is not None else output.logits  # as accelerate does
            loss = output.loss
            del output
            gradient = torch.ones_like(loss)
            del logits
            loss.backward(gradient)
            del loss, gradient
    finally:
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = sum(tensor.untyped_storage().nbytes() for tensor in before.values())
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert len(events) > 100
    return peak


@pytest.mark.parametrize("checkpointing", [False, {"preserve_rng_state": False}], ids=["", "checkpointing"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "attention"), [("bert", "eager"), ("llama", "sdpa"), ("t5", "eager")])
def test_tracker_has_the_peak_of_the_cpu_allocator(
    family: str, attention: str, precision: str, checkpointing: Any
) -> None:
    """Left are scalars that operators make out of Python numbers inside themselves: 8 bytes each, a few at a time."""
    step = StepSettings(precision=precision, checkpointing=checkpointing)
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's scratch memory is the next test's
        allocated = allocator_peak(family, step, attention)
    tracked = peak_bytes(record(family, "meta", step, attention).tracker)
    assert 0 <= allocated - tracked <= 128


@pytest.mark.parametrize(
    ("checkpointing", "share"), [(False, 0.012), ({"preserve_rng_state": False}, 0.04)], ids=["", "checkpointing"]
)
@pytest.mark.parametrize(("family", "attention"), [("bert", "sdpa"), ("llama", "eager")])
def test_onednn_takes_little_for_itself(family: str, attention: str, checkpointing: Any, share: float) -> None:
    """16-bit products reorder their operands inside one operator; without oneDNN the difference is 64 bytes or less.

    It is one layer's worth whatever the depth: 0.0 to 0.5 % here, 2.0 to 3.3 % where checkpointing leaves a peak of
    one layer's size.
    """
    step = StepSettings(precision="bf16", checkpointing=checkpointing)
    size = {"num_hidden_layers": 8, "intermediate_size": 128}
    tracked = peak_bytes(record(family, "meta", step, attention, **size).tracker)
    allocated = allocator_peak(family, step, attention, **size)
    assert 0 <= allocated - tracked <= share * allocated
    with torch.backends.mkldnn.flags(enabled=False):
        assert 0 <= allocator_peak(family, step, attention, **size) - tracked <= 64


def test_random_state_that_checkpointing_keeps_is_the_hosts() -> None:
    """The CPU's random state of every checkpoint: no operator makes it, and with a GPU it lies on the host as well."""
    kept, dropped = (
        allocator_peak("bert", StepSettings(precision="fp32", checkpointing={"preserve_rng_state": keep}), "sdpa")
        for keep in (True, False)
    )
    assert kept - dropped == 2 * torch.get_rng_state().numel()  # of 2 layers


# ---- Real autocast --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("checkpointing", [False, True, {"use_reentrant": True}], ids=["", "ckpt", "reentrant"])
@pytest.mark.parametrize(("family", "attention"), [("bert", "sdpa"), ("llama", "sdpa"), ("t5", "eager")])
def test_emulated_autocast_allocates_what_real_autocast_does(
    family: str, attention: str, checkpointing: Any, cache: bool
) -> None:
    """To the byte; only the order differs, as C++ casts the arguments of one operator from the last to the first."""
    step = StepSettings(precision="bf16", checkpointing=checkpointing, autocast_cache=cache)
    real = record(family, "cpu", step, attention, real_autocast=True).tracker
    emulated = record(family, "cpu", step, attention).tracker
    assert peak_bytes(emulated) == peak_bytes(real)
    assert made(emulated) == made(real)
    assert emulated.flops == real.flops


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("checkpointing", [True, {"use_reentrant": True}], ids=["ckpt", "reentrant"])
def test_emulated_autocast_of_a_frozen_model_is_the_real_one(checkpointing: Any, cache: bool) -> None:
    step = StepSettings(precision="bf16", checkpointing=checkpointing, autocast_cache=cache)
    real = record("bert", "cpu", step, real_autocast=True, prepare=freeze_first_layer).tracker
    emulated = record("bert", "cpu", step, prepare=freeze_first_layer).tracker
    assert peak_bytes(emulated) == peak_bytes(real)
    assert made(emulated) == made(real)


def attention_layer(weights: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    layer = torch.nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    return lambda x: layer(x, x, x, need_weights=weights)[0]


def biased_attention() -> Callable[[torch.Tensor], torch.Tensor]:
    bias = torch.nn.Parameter(torch.zeros(1, 4, SEQ, SEQ))

    def call(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(BATCH, SEQ, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias * 1, dropout_p=0.1)

    return call


COMPOSITES: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "multi-head attention": lambda: attention_layer(False),
    "multi-head attention with weights": lambda: attention_layer(True),
    "attention with a float mask": biased_attention,
    "normalize": lambda: lambda x: F.normalize(F.linear(x, x[0])) @ x[0],
    "gumbel_softmax": lambda: lambda x: F.gumbel_softmax(F.linear(x, x[0])),
    "interpolate": lambda: lambda x: F.interpolate(F.linear(x, x[0]), scale_factor=2.0, mode="linear"),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_allocate_under_emulated_autocast_what_they_do_under_the_real_one(name: str) -> None:
    """Functions that torch writes in Python, within which a mode is off by itself, and a mask that is cast as well."""
    found = {}
    for kind in ("real", "emulated"):
        torch.manual_seed(0)
        call, x = COMPOSITES[name](), torch.zeros(BATCH, SEQ, 32, requires_grad=True)
        tracker = StorageTracker(device_type="cpu")
        step = StepSettings(precision="bf16")
        semantics = (
            RealAutocast(step, tracker) if kind == "real" else HostSemantics(autocast=torch.bfloat16, tracker=tracker)
        )
        with recording(tracker, semantics):
            with semantics.autocast_region():
                out = call(x)
            with tracker.backward():
                run_backward(out, torch.ones_like(out))
        found[kind] = out.dtype, peak_bytes(tracker), made(tracker)
        assert out.dtype == torch.bfloat16
    assert found["emulated"] == found["real"]


# ---- torch's MemTracker ---------------------------------------------------------------------------------------------


def mem_tracker_peak(family: str, step: StepSettings, attention: str, **size: Any) -> tuple[int, int]:
    """Return the peaks of ``MemTracker`` and of our tracker in one and the same run."""
    model, inputs = checkpointed(build(family, "meta", attention, **size), step), batch(family, "meta")
    oracle, tracker = MemTracker(), StorageTracker()
    semantics = CudaSemantics(autocast=autocast_dtype(step.precision), tracker=tracker)
    oracle.track_external(model, *inputs.values())
    for tensor in (*model.parameters(), *model.buffers(), *inputs.values()):
        tracker.add(tensor)
    with recording(oracle, tracker, semantics):
        with semantics.autocast_region():
            output = model(**inputs)
        if autocast_dtype(step.precision) is not None:
            output["logits"] = output["logits"].float()
        loss = output["loss"]
        del output
        gradient = torch.ones_like(loss)
        with tracker.backward():
            run_backward(loss, gradient)
        del loss, gradient
    snapshot = oracle.get_tracker_snapshot("peak")[torch.device("meta")]
    return int(snapshot["Total"]), peak_bytes(tracker)


@pytest.mark.parametrize(
    ("family", "precision", "checkpointing"),
    [
        ("bert", "bf16", True),
        ("gpt2", "fp32", True),
        ("llama", "bf16", False),
        ("t5", "bf16", False),
        ("vit", "fp32", True),
        ("roberta", "bf16", False),
        ("distilbert", "bf16", False),
        ("deberta-v2", "fp32", False),
        ("modernbert", "bf16", False),
        ("qwen3", "bf16", True),
        ("mistral", "fp32", False),
        ("opt", "bf16", False),
    ],
)
def test_peak_is_that_of_torchs_mem_tracker(family: str, precision: str, checkpointing: bool) -> None:
    step = StepSettings(precision=precision, checkpointing=checkpointing)
    attention = SINGLE.get(family, ("sdpa",))[0]
    model = checkpointed(build(family, "meta", attention), step)
    ours = peak_bytes(record_step(model, batch(family, "meta"), step).tracker)
    assert mem_tracker_peak(family, step, attention) == (ours, ours)


@pytest.mark.slow
def test_known_exception_mem_tracker_keeps_an_input_alive() -> None:
    """Its hooks hold the encoder's output, which T5's checkpointed decoder layers share; the allocator says so too."""
    step = StepSettings(precision="fp32", checkpointing={"preserve_rng_state": False})
    model = checkpointed(build("t5", "meta", "eager", num_layers=3), step)
    ours = peak_bytes(record_step(model, batch("t5", "meta"), step).tracker)
    of_oracle, beside_it = mem_tracker_peak("t5", step, "eager", num_layers=3)
    assert of_oracle == beside_it == ours + BATCH * SEQ * 32 * 4
