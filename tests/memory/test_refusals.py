"""What ``estimate`` refuses, each with its whole message: models, sizes, settings that a model contradicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.nn import Embedding4bit, Embedding8bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig

import tiny
from hf_memopt import NotEstimableError, StepSettings, estimate, estimate_from_arguments, find_gpu

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft

TASKS = (
    *("speech-seq2seq", "seq2seq", "causal-lm", "image-text-to-text", "masked-lm", "sequence-classification"),
    *("token-classification", "question-answering", "multiple-choice", "image-classification"),
    *("zero-shot-image-classification", "semantic-segmentation", "object-detection", "ctc", "audio-classification"),
)
ALL_TASKS = ", ".join(map(repr, TASKS))
BERT_TASKS = (
    "'causal-lm', 'masked-lm', 'sequence-classification', 'token-classification', 'question-answering', "
    "'multiple-choice'"
)
NO_HEAD = (
    f"has no head whose batch is known; expected one of transformers' for {ALL_TASKS}. Load the model with its head, "
    "for example: AutoModelForSequenceClassification.from_pretrained(...)"
)
A_COUNT = "is invalid; expected an integer of 1 or more. Pass"
GPTQ = (
    "not estimable: quantization_config of method 'gptq' has no form on the meta device; expected bitsandbytes, or "
    "plain weights. Load the model in bfloat16"
)
COMPILED = "what the compiler fuses and saves is decided on the GPU; expected a module that runs as it is written."
IN_PLACE = "Pass the model before it calls compile()"
NO_KERNELS = (
    "not estimable: attn_implementation='flash_attention_3' needs kernels that are not installed; expected 'sdpa', "
    "'eager' or 'flash_attention_2'. Pass attn_implementation='sdpa'"
)
NO_SUCH_ATTENTION = (
    "attn_implementation='spda' is unknown; expected one of 'eager', 'sdpa', 'flash_attention_2', or another that "
    f"transformers {transformers.__version__} has registered. Did you mean 'sdpa'? Pass attn_implementation='sdpa'"
)

VIT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
vit = partial(transformers.ViTConfig, image_size=32, **VIT)
bart = partial(transformers.BartConfig, vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1)


def changed(model: Any, change: Callable[[Any], Any]) -> Any:
    """Return a model after a change, which may return another one."""
    found = change(model)
    return found if isinstance(found, nn.Module) else model


def with_compiled_layer(model: Any, *, in_place: bool = False) -> None:
    layer = model.bert.encoder.layer[1]
    if in_place:
        layer.compile(backend="eager")
    else:
        model.bert.encoder.layer[1] = torch.compile(layer, backend="eager")


def with_(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


def gptq_config() -> Any:
    return tiny.llama_config(quantization_config={"quant_method": "gptq", "bits": 4})


def in_4_bits() -> Any:
    config = tiny.llama_config()
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    return config


def with_adapters() -> Any:
    return get_peft_model(tiny.bert(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))


def of_gptq() -> Any:
    model = tiny.llama()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    return model


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no model": (
        lambda: 3,
        {},
        "model=<int> cannot be loaded; expected an nn.Module, a PretrainedConfig, or the name of a model or a "
        "folder. Pass model='bert-base-uncased'",
    ),
    "a head of one's own": (lambda: nn.Linear(2, 2), {}, f"model=<Linear> {NO_HEAD}"),
    "no head": (lambda: transformers.BertModel(tiny.bert_config()), {}, f"model=<BertModel> {NO_HEAD}"),
    "a head without a known loss": (
        lambda: tiny.bert_config(architectures=["BertForNextSentencePrediction"]),
        {},
        "architectures=['BertForNextSentencePrediction'] is not a head with a known loss and batch; expected "
        f"one for {BERT_TASKS}. Pass task='sequence-classification'",
    ),
    "a type without heads": (
        transformers.VitsConfig,
        {},
        "model_type='vits' has no head whose batch is known; expected a model type with one of "
        f"{ALL_TASKS}. Pass a configuration of such a type",
    ),
    "a task of other types": (
        tiny.bert_config,
        {"task": "seq2seq"},
        f"task='seq2seq' has no head for a model of type 'bert'; expected one of {BERT_TASKS}. Leave it out "
        "for the usual one",
    ),
    "an unknown task": (
        tiny.bert_config,
        {"task": "casual-lm"},
        f"task='casual-lm' is unknown; expected one of {ALL_TASKS}. Did you mean 'causal-lm'? "
        "Pass task='sequence-classification'",
    ),
    "a configuration quantised by another library": (gptq_config, {}, GPTQ),
    "a module quantised by another library": (of_gptq, {}, GPTQ),
    "an attention without kernels": (tiny.llama_config, {"attn_implementation": "flash_attention_3"}, NO_KERNELS),
    "an attention without kernels, of a module": (tiny.llama, {"attn_implementation": "flash_attention_3"}, NO_KERNELS),
    "an unknown attention": (lambda: "bert-base-uncased", {"attn_implementation": "spda"}, NO_SUCH_ATTENTION),
    "an unknown attention, of a module": (tiny.bert, {"attn_implementation": "spda"}, NO_SUCH_ATTENTION),
    "heads wider than any kernel": (
        lambda: tiny.llama_config(
            hidden_size=2**18, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1
        ),
        {},
        "not estimable: an attention head has 131072 numbers; expected at most 65536, as torch has no kernel for more. "
        "Pass attn_implementation='eager', or a model with more heads",
    ),
    "pictures of a size that no batch can have": (
        lambda: changed(transformers.ViTForImageClassification(vit()), lambda m: setattr(m.config, "image_size", -3)),
        {"seq_len": None},
        "batch=<tensor of shape (2, 3, -3, -3)> cannot be created; expected sizes of 1 or more, and below 2**63 bytes "
        "in total. Correct the configuration, or pass a smaller batch_size",
    ),
    # pins _orig_mod and _compiled_call_impl of torch
    "compiled": (
        lambda: torch.compile(tiny.bert(), backend="eager"),
        {},
        f"not estimable: model=<OptimizedModule> is compiled: {COMPILED} Pass model._orig_mod",
    ),
    "a compiled layer": (
        lambda: changed(tiny.bert(), with_compiled_layer),
        {},
        f"not estimable: model=<BertForSequenceClassification> is compiled (bert.encoder.layer.1): {COMPILED} Put "
        "bert.encoder.layer.1._orig_mod in its place",
    ),
    "compiled in place": (
        lambda: changed(tiny.bert(), lambda model: model.compile(backend="eager")),
        {},
        f"not estimable: model=<BertForSequenceClassification> is compiled: {COMPILED} {IN_PLACE}",
    ),
    "a layer compiled in place": (
        lambda: changed(tiny.bert(), partial(with_compiled_layer, in_place=True)),
        {},
        "not estimable: model=<BertForSequenceClassification> is compiled (bert.encoder.layer.1): "
        f"{COMPILED} {IN_PLACE}",
    ),
    "a parameter without a form on meta": (
        lambda: changed(tiny.bert(), with_("more", nn.UninitializedParameter())),
        {},
        "not estimable: BertForSequenceClassification.more is a UninitializedParameter, which has no form on the meta "
        "device; expected plain parameters or bitsandbytes' linears. Pass model.config",
    ),
    **{
        f"embeddings in {bits} bits": (
            lambda module=module: changed(tiny.bert(), with_("more", module)),
            {},
            f"not estimable: {type(module).__name__}.weight is a {type(module.weight).__name__}, which has no form on "
            "the meta device; expected plain parameters or bitsandbytes' linears. Pass model.config",
        )
        for bits, module in ((4, Embedding4bit(8, 64)), (8, Embedding8bit(8, 8)))
    },
    "trainable weights in 8 bits": (
        lambda: changed(tiny.bert(), with_("classifier", Linear8bitLt(32, 3))),
        {},
        "not estimable: Linear8bitLt with has_fp16_weights=True quantises a trainable weight in every step; expected a "
        "frozen 8-bit weight. Pass BitsAndBytesConfig(load_in_8bit=True)",
    ),
    "what cannot be copied": (
        lambda: changed(tiny.bert(), with_("stream", (number for number in ()))),
        {},
        "not estimable: model=<BertForSequenceClassification> holds an object that cannot be copied (cannot pickle "
        "'generator' object); expected a module that copy.deepcopy takes. Pass model.config",
    ),
}

SIZES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    **{
        f"batch_size={value!r}": (
            tiny.bert_config,
            {"batch_size": value},
            f"batch_size={value!r} {A_COUNT} batch_size=1",
        )
        for value in (0, -1, 1.5, True, "8")
    },
    "no tokens": (tiny.bert_config, {"seq_len": 0}, f"seq_len=0 {A_COUNT} seq_len=1"),
    "beyond the positions": (
        tiny.bert_config,
        {"seq_len": 65},
        "seq_len=65 is beyond the positions of BertForSequenceClassification; expected 1 to 64. Pass seq_len=64",
    ),
    "tokens of pictures": (
        vit,
        {"seq_len": 8},
        "seq_len=8 has no meaning for ViTForImageClassification, which takes images; expected none. Pass seq_len=None",
    ),
    "labels of an encoder": (
        tiny.bert_config,
        {"labels_length": 8},
        "labels_length=8 has no meaning for BertForSequenceClassification; expected None for all but encoder-decoders. "
        "Remove labels_length",
    ),
    "labels beyond the positions": (
        bart,
        {"labels_length": 1025},
        "labels_length=1025 is beyond the positions of BartForConditionalGeneration; expected 1 to 1024. "
        "Pass labels_length=1024",
    ),
    "lengths and kept gradients": (
        tiny.bert_config,
        {"seq_len": None, "lengths": [8, 16], "zero_grad_to_none": False},
        "lengths=..., zero_grad_to_none=False are incompatible: each length has gradients of its own; expected only "
        "one of them. Pass seq_len= with the longest length instead",
    ),
}

SETTINGS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "an unknown one": (
        tiny.bert_config,
        {"optimiser": "sgd"},
        "optimiser='sgd' is not a setting of a step; expected one of "
        f"{', '.join(item.name for item in dataclasses.fields(StepSettings))}. See help(hf_memopt.StepSettings)",
    ),
    "a recipe by name": (
        tiny.bert_config,
        {"recipe": "4gb-gpu"},
        "recipe='4gb-gpu' is not a recipe; expected an object with step_settings(). "
        "Pass recipe=hf_memopt.recipe('4gb-gpu')",
    ),
    "hints that are no bool": (
        tiny.bert_config,
        {"hints": 1},
        "hints=1 is invalid; expected True or False. Pass hints=False",
    ),
    "another dtype than the module's": (
        tiny.bert,
        {"weights_dtype": "bfloat16"},
        "weights_dtype='bfloat16' is not that of the given module, whose weights are float32; expected 'float32'. "
        "Call: model.to(torch.bfloat16)",
    ),
    **{
        f"{dtype} under the scaler": (
            tiny.bert_config,
            {"precision": "fp16", "weights_dtype": dtype},
            f"precision='fp16' trains bert.embeddings.word_embeddings.weight in {dtype}, whose gradients torch's "
            "scaler refuses; expected float32 for trainable weights. Pass weights_dtype='float32' (for a module: "
            "model.float()), or precision='fp32'",
        )
        for dtype in ("float16", "bfloat16")
    },
    "adapters on no layer": (
        tiny.bert_config,
        {"lora": LoraConfig(target_modules=["wq"])},
        "lora=LoraConfig(target_modules={'wq'}) cannot be added to BertForSequenceClassification (Target modules "
        "{'wq'} not found in the base model. Please check the target modules and try again); expected target_modules "
        "that name linear layers of the model. Pass lora=16, which takes all of them but the head",
    ),
    "adapters twice": (
        with_adapters,
        {"lora": 4},
        "lora=4 is given for a PeftModelForSequenceClassification, which has adapters already; expected a model "
        "without them. Remove lora, or pass model=model.unload()",
    ),
    "a module in 4 bits": (
        tiny.llama,
        {"lora": 4, "load_in": "nf4"},
        "load_in='nf4' cannot quantise the given module=<LlamaForCausalLM>, which is loaded already; expected a name "
        "or a configuration. Pass model=model.config, or a module that from_pretrained(quantization_config=...) has "
        "loaded, without load_in",
    ),
    "4 bits twice": (
        in_4_bits,
        {"lora": 4, "load_in": "nf4"},
        "load_in='nf4' is given for a model whose configuration has a quantization_config; expected only one of them. "
        "Remove load_in, or call: del config.quantization_config",
    ),
    "4 bits without adapters": (
        tiny.llama_config,
        {"load_in": "nf4", "prepare": (lambda model: None,)},
        "load_in='nf4' is used without adapters: quantised weights have no gradient, and the Trainer refuses such a "
        "model; expected a function of prepare that adds some, or lora. Pass lora=16",
    ),
    "patterns without a parameter": (
        tiny.bert_config,
        {"freeze": "no such layer"},
        "patterns='no such layer' matches no parameter of BertForSequenceClassification; expected a module or "
        "parameter name, a glob, 'embeddings', 'base' or 'layers:first-last'. Pass patterns='layers:0', or one of its "
        "parts: bert, classifier",
    ),
}


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [pytest.param(*row, id=name) for name, row in {**MODELS, **SIZES, **SETTINGS}.items()],
)
def test_it_is_refused(model: Callable[[], Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        estimate(model(), **{"batch_size": 2, "seq_len": 8, "gpu": "T4", "precision": "fp32", **settings})
    assert str(error.value) == message
    assert isinstance(error.value, NotEstimableError) == message.startswith("not estimable: ")


def test_a_dtype_that_is_not_the_modules_is_refused_beside_arguments(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"^weights_dtype='bfloat16' is not that of the given module"):
        estimate_from_arguments(tiny.bert(), tiny.arguments(tmp_path), 8, weights_dtype="bfloat16")


def test_an_unknown_gpu_gets_the_nearest_ones() -> None:
    with pytest.raises(ValueError) as expected:
        find_gpu("RTX 3065")
    with pytest.raises(ValueError) as error:
        estimate(tiny.bert_config(), batch_size=2, seq_len=8, gpu="RTX 3065")
    assert str(error.value) == str(expected.value)
