"""The recorded step against four oracles: real CPU tensors, the real CPU allocator, real autocast, torch's MemTracker.

The first three run the very model on real memory. No oracle shares code with the tracker except the first, which is
the tracker itself on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from host_semantics import HostSemantics, RealAutocast
from recorded import allocator_peak, made, origins, peak_bytes, prepared, record, sizes
from slow_cases import slow_except
from torch import nn

import tiny
from hf_memopt.types import StepSettings

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
LLAMA = {**DECODER, "attention_dropout": 0.1}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}
VIT |= {"patch_size": 8, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
DEBERTA = {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
OPT = {**TEXT, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
WIDE = {"intermediate_size": 512, "num_hidden_layers": 1, "max_position_embeddings": 64}
LARGE = {"vocab_size": 400, "pad_token_id": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", ENCODER),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "t5": ("T5ForConditionalGeneration", T5),
    "vit": ("ViTForImageClassification", VIT),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2},
    ),
    "deberta-v2": ("DebertaV2ForSequenceClassification", DEBERTA),
    "modernbert": ("ModernBertForMaskedLM", {**ENCODER, "pad_token_id": 0}),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", {**DECODER, "head_dim": 8}),
    "opt": ("OPTForCausalLM", OPT),
    # of one row that has every token once: without values all tokens count as distinct, all positions as labelled
    "tied llama": ("LlamaForCausalLM", {**LLAMA, **LARGE, "num_attention_heads": 2, "tie_word_embeddings": True}),
    "tied t5": ("T5ForConditionalGeneration", {**T5, "vocab_size": 400}),
    "tied bert": ("BertForMaskedLM", {**ENCODER, **LARGE}),
    "wide llama": ("LlamaForCausalLM", {**DECODER, **WIDE}),
    "wide qwen3": ("Qwen3ForCausalLM", {**DECODER, **WIDE, "head_dim": 8}),
    "wide mistral": ("MistralForCausalLM", {**DECODER, **WIDE, "head_dim": 8}),
    "wide modernbert": ("ModernBertForMaskedLM", {**ENCODER, **WIDE, "pad_token_id": 0}),
}
SINGLE = {"t5": ("eager",), "deberta-v2": ("eager",)}  # no sdpa with dropout to compare


def build(family: str, device: str, attention: str = "eager", dtype: str = "float32", **changed: Any) -> Any:
    """Return a tiny model of a family in training mode, on a device, its weights drawn from one seed."""
    name, settings = MODELS[family]
    head = getattr(transformers, name)
    if family == "wide modernbert" and tiny.IS_BEFORE_5_17:
        pytest.skip("ModernBertConfig of transformers before 5.17 refuses what its checks add")
    configuration = head.config_class(**{**settings, **changed})
    configuration._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device(device):
        return head(configuration).train().to(getattr(torch, dtype))


def batch(family: str, device: str) -> dict[str, torch.Tensor]:
    """Return a batch whose second row is padded, of the same values for every device."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, VOCABULARY, (BATCH, SEQ), generator=draw)
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    mask[1, SEQ - 4 :] = 0
    if family.startswith("tied"):
        tokens, mask = torch.arange(5, 5 + SEQ).view(1, -1), mask[1:2].clone()
    tensors = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}
    if family == "tied llama":  # which else ignores the last label of a row
        tensors["shift_labels"] = tokens.clone()
    if "Classification" in MODELS[family][0]:
        tensors["labels"] = torch.zeros(BATCH, dtype=torch.int64)
    if family == "vit":
        tensors = {"pixel_values": torch.rand(BATCH, 3, 32, 32, generator=draw), "labels": tensors["labels"]}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def recorded(family: str, device: str, attention: str, semantics: Any = HostSemantics, **given: Any) -> Any:
    """Return a recorded step of a family with these settings, after a pass in which real tiles are compared."""
    settings = StepSettings(**given)
    model, inputs = prepared(build(family, device, attention), settings), batch(family, device)
    if settings.tiled and device == "cpu":
        model(**inputs)
    return record(model, inputs, settings, semantics, evaluate=settings.eval_batch_size is not None)


PAIRS = [
    (family, attention)
    for family in ("bert", "gpt2", "llama", "t5", "vit")
    for attention in SINGLE.get(family, ("eager", "sdpa"))
]
STEPS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "gradient_accumulation_steps": 2},
    "bf16": {"precision": "bf16"},
    "bf16, checkpointing": {"precision": "bf16", "checkpointing": True, "gradient_accumulation_steps": 2},
    "fp32, reentrant": {"precision": "fp32", "checkpointing": {"use_reentrant": True}},
    "bf16, every second layer": {"precision": "bf16", "checkpointing": {"every_n_layers": 2}},
}
RELEASED = {"gradient_release": True, "max_grad_norm": 0}
ROWS, NO_LOGITS = {"sparse_tied_embedding": True}, {"fused_cross_entropy": True}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"precision": "bf16", "label_smoothing_factor": 0.1}),
    ("gpt2", {"precision": "fp32", "label_smoothing_factor": 0.1}),
    ("llama", {"precision": "bf16", "label_smoothing_factor": 0.1}),
    ("bert", {"precision": "fp16"}),
    ("llama", {"precision": "bf16", "autocast_cache": False, "checkpointing": True}),
    ("t5", {"precision": "fp32", **RELEASED}),
    ("gpt2", {"precision": "fp32", "checkpointing": {"use_reentrant": True, "preserve_rng_state": False}}),
    ("gpt2", {"precision": "fp32", "loop": "manual", "zero_grad_to_none": False}),
    ("t5", {"precision": "bf16", "loop": "manual", "gradient_accumulation_steps": 2}),
    *((family, {"precision": "bf16", "eval_batch_size": BATCH}) for family in ("bert", "gpt2", "llama", "t5", "vit")),
    *((family, {"precision": "bf16", "freeze": ("embeddings", "layers:0")}) for family in ("bert", "gpt2", "llama")),
    *(
        (f"wide {family}", {"precision": "bf16", "tiled": True, "tile_tokens": 8, "checkpointing": checkpointing})
        for family in ("llama", "qwen3", "mistral", "modernbert")
        for checkpointing in (False, True)
    ),
    ("tied llama", {"precision": "fp32", **ROWS, **RELEASED}),
    ("tied llama", {"precision": "fp32", **ROWS, **NO_LOGITS, "gradient_accumulation_steps": 2}),
    ("tied llama", {"precision": "bf16", **ROWS, "gradient_accumulation_steps": 2, "checkpointing": True}),
    ("tied t5", {"precision": "fp32", **ROWS, **RELEASED}),
    ("tied t5", {"precision": "fp32", **NO_LOGITS}),
    ("tied bert", {"precision": "fp32", "checkpointing": True, **ROWS, **NO_LOGITS, **RELEASED}),
]
CASES = [
    *((family, attention, step) for family, attention in PAIRS for step in STEPS.values()),
    *((family, "eager", step) for family, step in OTHERS),
]


@pytest.mark.parametrize(("family", "attention", "step"), slow_except(CASES[::8], CASES))
def test_meta_step_is_the_real_step_to_the_byte(family: str, attention: str, step: dict[str, Any]) -> None:
    real, meta = (recorded(family, device, attention, **step) for device in ("cpu", "meta"))
    assert peak_bytes(meta) == peak_bytes(real)
    if not step.get("fused_cross_entropy"):  # whose labelled rows are looked up where there are values
        assert sizes(meta) == sizes(real)
        assert origins(meta) == origins(real)
        assert meta.flops == real.flops > [0]
    if "eval_batch_size" in step:
        gathered = [[one.tracker.sizes[number] for number in one.evaluation.outputs] for one in (meta, real)]
        assert gathered[0] == gathered[1] != []
    if step.get("tiled"):
        whole = recorded(family, "meta", attention, **{**step, "tiled": False, "tile_tokens": None})
        assert peak_bytes(meta) < peak_bytes(whole)
        assert meta.flops == whole.flops if step["checkpointing"] else meta.flops > whole.flops


@pytest.mark.parametrize("family", slow_except(("t5",), ("bert", "llama", "t5", "vit")))
@pytest.mark.parametrize("checkpointing", [False, {"use_reentrant": True}], ids=["", "checkpointing"])
def test_cudas_dropout_and_autocast_on_meta_are_those_on_real_tensors(family: str, checkpointing: Any) -> None:
    """The CUDA lists and the byte mask run on a CPU too; only its attention kernels and float16 softmax do not."""
    step = {"precision": "bf16", "checkpointing": checkpointing}
    real, meta = (recorded(family, device, "eager", "cuda", **step) for device in ("cpu", "meta"))
    assert sizes(meta) == sizes(real)
    assert peak_bytes(meta) == peak_bytes(real)


def adapted(family: str, device: str, dtype: str, lora: Any) -> Any:
    """Return a model with adapters by the settings on meta, by peft itself on the host."""
    import peft

    model = build(family, device, dtype=dtype)
    if device == "meta":
        return prepared(model, StepSettings(lora=lora))
    task_types = {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "bert": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM"}
    if isinstance(lora, int):
        heads = {"vit": ["classifier"], "bert": ["classifier", "bert.pooler"]}.get(family)
        task = task_types.get(family)
        lora = peft.LoraConfig(r=lora, target_modules="all-linear", task_type=task, modules_to_save=heads)
    return peft.get_peft_model(model, lora)


ADAPTED = [
    *((family, "float32", step) for family in ("bert", "gpt2", "llama", "t5", "vit") for step in ("fp32", "bf16")),
    # LayerNorm of 16-bit tensors keeps its statistics in 16 bits on the CPU, in float32 on CUDA and on meta
    *((family, "bfloat16", step) for family in ("llama", "t5") for step in ("bf16", "bf16, checkpointing")),
    ("llama", "bfloat16", "fp32, reentrant"),
]


@pytest.mark.parametrize("lora", slow_except([4], [4, {"r": 2, "lora_dropout": 0.1}]), ids=["rank", "configuration"])
@pytest.mark.parametrize(("family", "dtype", "step"), slow_except(ADAPTED[1::4], ADAPTED))
def test_adapters_of_the_settings_are_pefts_to_the_byte(family: str, dtype: str, step: str, lora: Any) -> None:
    import peft

    if not isinstance(lora, int):
        lora = peft.LoraConfig(target_modules="all-linear", **lora)
    settings = StepSettings(**STEPS[step])
    found = [
        record(prepared(adapted(family, device, dtype, lora), settings), batch(family, device), settings)
        for device in ("cpu", "meta")
    ]
    real, meta = found
    assert sizes(meta) == sizes(real)
    assert peak_bytes(meta) == peak_bytes(real)
    gradients = [[trace.tracker.sizes[number] for number in trace.gradients] for trace in found]
    assert gradients[0] == gradients[1] != []


def real_peak(family: str, attention: str, given: dict[str, Any], **size: int) -> int:
    """Return the peak of torch's CPU allocator in a plain training step."""
    settings = StepSettings(**given)
    model, inputs = prepared(build(family, "cpu", attention, **size), settings), batch(family, "cpu")
    for parameter in model.parameters() if settings.gradient_release else ():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with allocator_peak(model, inputs) as peak:
        is_lower = settings.precision == "bf16"
        with torch.autocast("cpu", torch.bfloat16, is_lower, cache_enabled=settings.autocast_cache):
            output = model(**inputs)
        logits = output["logits"].float() if is_lower else None  # as accelerate does
        loss = output["loss"]
        del output
        gradient = torch.ones_like(loss)
        del logits
        loss.backward(gradient)
        del loss, gradient
    return peak[0]


CHECKPOINTED = {"checkpointing": {"preserve_rng_state": False}}
ALLOCATED: list[tuple[str, str, dict[str, Any], int]] = [
    # left are scalars that operators make out of Python numbers inside themselves: 8 bytes each, a few at a time
    *(
        (family, attention, {"precision": precision, **checkpointing}, 128)
        for family, attention in (("bert", "eager"), ("llama", "sdpa"), ("t5", "eager"))
        for precision in ("fp32", "bf16")
        for checkpointing in ({}, CHECKPOINTED)
    ),
    # and lists of indices, below the size of one row each
    ("tied llama", "eager", {"precision": "fp32", **ROWS, **RELEASED}, SEQ * 8 + 128),
    ("tied llama", "eager", {"precision": "fp32", **ROWS, **NO_LOGITS, **RELEASED, **CHECKPOINTED}, SEQ * 8 + 128),
    ("tied t5", "eager", {"precision": "fp32", **ROWS}, SEQ * 8 + 128),
]


@pytest.mark.parametrize(("family", "attention", "step", "own_bytes"), slow_except(ALLOCATED[::4], ALLOCATED))
def test_tracker_has_the_peak_of_the_cpu_allocator(
    family: str, attention: str, step: dict[str, Any], own_bytes: int
) -> None:
    tracked = peak_bytes(recorded(family, "meta", attention, **step))
    assert 0 <= real_peak(family, attention, step) - tracked <= own_bytes


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("checkpointing", [False, True, {"use_reentrant": True}], ids=["", "ckpt", "reentrant"])
@pytest.mark.parametrize(
    ("family", "attention", "freeze"),
    slow_except(
        [("llama", "sdpa", ())],
        [
            ("bert", "sdpa", ()),
            ("llama", "sdpa", ()),
            ("t5", "eager", ()),
            ("bert", "eager", ("embeddings", "layers:0")),
        ],
    ),
)
def test_emulated_autocast_allocates_what_real_autocast_does(
    family: str, attention: str, freeze: tuple[str, ...], checkpointing: Any, cache: bool
) -> None:
    """To the byte; only the order differs, as C++ casts the arguments of one operator from the last to the first."""
    step = {"precision": "bf16", "checkpointing": checkpointing, "autocast_cache": cache, "freeze": freeze}
    real, emulated = (recorded(family, "cpu", attention, one, **step) for one in (RealAutocast, HostSemantics))
    assert peak_bytes(emulated) == peak_bytes(real)
    assert made(emulated) == made(real)
    assert emulated.flops == real.flops


def attention_layer(weights: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    layer = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    return lambda x: layer(x, x, x, need_weights=weights)[0]


def biased_attention() -> Callable[[torch.Tensor], torch.Tensor]:
    bias = nn.Parameter(torch.zeros(1, 4, SEQ, SEQ))

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


class Composite(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call, self.dtype = call, torch.float32
        self.weight = nn.Parameter(torch.zeros(BATCH, SEQ, 32))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.call(self.weight * x)
        self.dtype = out.dtype
        return {"loss": out.sum()}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_allocate_under_emulated_autocast_what_they_do_under_the_real_one(name: str) -> None:
    """Functions that torch writes in Python, within which a mode is off by itself, and a mask that is cast as well."""
    found = []
    for semantics in (RealAutocast, HostSemantics):
        torch.manual_seed(0)
        model = Composite(COMPOSITES[name]())
        trace = record(model, {"x": torch.zeros(BATCH, SEQ, 32)}, StepSettings(precision="bf16"), semantics)
        assert model.dtype == torch.bfloat16
        found.append((peak_bytes(trace), made(trace)))
    assert found[0] == found[1]
