"""What ``TrainingArguments`` say of a step, and their names as arguments of ``estimate``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers

import tiny
from hf_memopt import NotEstimableError, StepSettings, estimate, estimate_from_arguments, find_gpu
from hf_memopt.binding import checkpointing_arguments
from hf_memopt.binding import versions as compat


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate without a GPU also where there is one."""
    for module in ("estimation", "training_arguments"):
        monkeypatch.setattr(f"hf_memopt.memory.{module}.current_gpu", lambda: None)


# ---- Arguments that are read ----------------------------------------------------------------------------------------

READ: list[tuple[dict[str, Any], dict[str, Any]]] = [  # arguments, and settings; the rest as without
    ({}, {"precision": "fp32", "optim": "sgd", "max_grad_norm": 0.0, "eval_batch_size": None}),
    ({"bf16": True}, {"precision": "bf16"}),
    ({"optim": "adamw_bnb_8bit"}, {"optim": "adamw_bnb_8bit"}),
    ({"optim": "adafactor", "weight_decay": 0.1}, {"optim": "adafactor", "weight_decay": 0.1}),
    (*[{"optim": "galore_adamw", "optim_target_modules": "all-linear", "optim_args": "rank=4"}] * 2,),
    *((given, given) for given in ({"max_grad_norm": 0.5}, {"gradient_accumulation_steps": 3})),
    *((given, given) for given in ({"label_smoothing_factor": 0.1}, {"torch_empty_cache_steps": 4})),
    (
        {"eval_strategy": "epoch", "per_device_eval_batch_size": 3, "eval_accumulation_steps": 2},
        {"eval_batch_size": 3, "eval_accumulation_steps": 2, "prediction_loss_only": False},
    ),
    ({"eval_on_start": True, "per_device_eval_batch_size": 5}, {"eval_batch_size": 5}),
    (
        {"eval_strategy": "epoch", "batch_eval_metrics": True, "eval_do_concat_batches": False},
        {"eval_batch_size": 8, "batch_eval_metrics": True, "eval_do_concat_batches": False},
    ),
    ({"eval_strategy": "steps", "prediction_loss_only": True}, {"eval_batch_size": 8, "prediction_loss_only": True}),
    (checkpointing_arguments(), {"checkpointing": {"use_reentrant": False}}),
    ({next(iter(checkpointing_arguments())): True}, {"checkpointing": True}),
]


@pytest.mark.parametrize(("arguments", "expected"), READ, ids=lambda value: next(iter(value), "none"))
def test_arguments_are_read(tmp_path: Any, arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    args = tiny.arguments(tmp_path, **arguments)
    before = args.to_dict()
    found = estimate_from_arguments(tiny.bert_config(), args, 8)
    plain = {"optim": "sgd", "max_grad_norm": 0.0, "precision": "fp32"}
    by_hand = estimate(tiny.bert_config(), batch_size=8, seq_len=8, **{**plain, **expected})
    assert found.settings == by_hand.settings == StepSettings(**{**plain, **expected})
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "notes", "flops"):
        assert getattr(found, name) == getattr(by_hand, name)
    assert args.to_dict() == before


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_precision_that_only_a_gpu_accepts(tmp_path: Any, precision: str) -> None:
    args = tiny.arguments(tmp_path)
    setattr(args, precision, True)
    assert estimate_from_arguments(tiny.bert_config(), args, 8).settings.precision == precision


@pytest.mark.parametrize("lengths", [12, [3, 12, 5], np.array([12, 1], np.int32), (12,), np.int64(12)])
def test_the_longest_row_counts(tmp_path: Any, lengths: Any) -> None:
    args = tiny.arguments(tmp_path, per_device_train_batch_size=3)
    found = estimate_from_arguments(tiny.bert_config(), args, lengths, gpu="T4")
    assert (found.seq_len, found.batch_size, found.gpu) == (12, 3, find_gpu("T4"))


def test_images_have_no_lengths(tmp_path: Any) -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    assert estimate_from_arguments(config, tiny.arguments(tmp_path), None).seq_len is None


def test_overrides_beat_the_arguments(tmp_path: Any) -> None:
    args = tiny.arguments(tmp_path, optim="sgd", eval_strategy="epoch")
    overrides = {"optim": "adafactor", "eval_batches": 4, "micro_batch_size": 2}
    found = estimate_from_arguments(tiny.bert_config(), args, 8, task="masked-lm", **overrides)
    assert {name: getattr(found.settings, name) for name in overrides} == overrides
    assert found.model == "BertForMaskedLM"


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_evaluation_in_16_bits_changes_nothing_while_training(tmp_path: Any, name: str) -> None:
    plain, args = (tiny.arguments(tmp_path, eval_strategy="epoch") for _ in range(2))
    setattr(args, name, True)
    expected, found = (estimate_from_arguments(tiny.bert_config(), each, 8) for each in (plain, args))
    assert found.peak_reserved_bytes == expected.peak_reserved_bytes
    assert found.notes == (
        *expected.notes,
        f"{name} changes nothing while training: the Trainer casts the weights only in an evaluate() outside train()",
    )


# ---- FSDP -----------------------------------------------------------------------------------------------------------


def sharded_arguments(folder: Any, **config: Any) -> Any:
    made = compat.fsdp_arguments(offload_params=False)
    return tiny.arguments(folder, bf16=True, **{**made, "fsdp_config": {**made["fsdp_config"], **config}})


@pytest.mark.parametrize("offload", [False, True])
def test_fsdp_arguments_are_the_sharded_estimate(tmp_path: Any, offload: bool) -> None:
    config, sharded = tiny.bert_config(), {"world_size": 2, "strategy": "fsdp2", "offload_params": offload}
    args = tiny.arguments(tmp_path, bf16=True, optim="adamw_torch", **compat.fsdp_arguments(offload_params=offload))
    found = estimate_from_arguments(config, args, 8, task="sequence-classification", world_size=2)
    sizes = {"batch_size": args.per_device_train_batch_size, "seq_len": 8, "task": "sequence-classification"}
    expected = estimate(config, bf16=True, optim="adamw_torch", **sizes, **sharded)
    assert {name: getattr(found.settings, name) for name in sharded} == sharded
    assert (found.peak_reserved_bytes, found.components) == (expected.peak_reserved_bytes, expected.components)
    of_rank = estimate_from_arguments(config, args, 8, task="sequence-classification", world_size=4)
    assert of_rank.peak_allocated_bytes < found.peak_allocated_bytes or offload


def test_layers_that_fsdp_arguments_name_are_a_note(tmp_path: Any) -> None:
    args = sharded_arguments(tmp_path, transformer_layer_cls_to_wrap=["BertLayer"])
    found = estimate_from_arguments(tiny.bert_config(), args, 8, task="sequence-classification", world_size=2)
    assert found.notes[-1] == (
        "fsdp_config['transformer_layer_cls_to_wrap']='BertLayer' is not read: the layers that the model's class names "
        "are wrapped (_no_split_modules)"
    )


AGAIN = "Pass TrainingArguments(..., fsdp=True, fsdp_config="
FSDP_REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {},
        {},
        "shards over a number of processes that TrainingArguments do not have; expected 2 or more. Pass "
        "estimate_from_arguments(..., world_size=2)",
    ),
    (
        {"reshard_after_forward": False},
        {"world_size": 2},
        "with fsdp_config['reshard_after_forward']=False; expected FSDP2, full shard. "
        f"{AGAIN}{{'reshard_after_forward': True}})",
    ),
    (
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10},  # 5.8 reads the second, from 5.17 on the first
        {"world_size": 2},
        "with fsdp_config['auto_wrap_policy']='SIZE_BASED_WRAP'; expected FSDP2, full shard. "
        f"{AGAIN}{{'auto_wrap_policy': 'TRANSFORMER_BASED_WRAP'}})",
    ),
    (
        {"activation_checkpointing": True},
        {"world_size": 2},
        "with fsdp_config['activation_checkpointing']=True; expected checkpointing as TrainingArguments have it. "
        f"{AGAIN}{{'activation_checkpointing': False}})",
    ),
]


@pytest.mark.parametrize(("config", "overrides", "message"), FSDP_REFUSED, ids=lambda value: str(value)[:30])
def test_fsdp_arguments_that_are_not_simulated(tmp_path: Any, config: Any, overrides: Any, message: str) -> None:
    args = sharded_arguments(tmp_path, **config)
    with pytest.raises(NotEstimableError) as error:
        estimate_from_arguments(tiny.bert_config(), args, 8, **overrides)
    assert str(error.value) == f"not estimable: fsdp={args.fsdp!r} {message}"


# ---- What is not simulated ------------------------------------------------------------------------------------------

NOT_SIMULATED: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # attributes, overrides, message
    ({"torch_compile": True}, {}, "torch_compile=True: what the compiler fuses and saves is decided on the GPU"),
    ({"use_liger_kernel": True}, {}, "use_liger_kernel=True: its Triton kernels do not run without a GPU"),
    (
        {"deepspeed": "zero2.json"},
        {},
        "deepspeed='zero2.json': its configuration is not read. Pass world_size=2, strategy='zero2'",
    ),
    ({"use_cache": True}, {}, "use_cache=True: a key-value cache in training is not simulated"),
    ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha=5.0: its noise on the embeddings is not simulated"),
    (
        {"include_for_metrics": ["loss", "inputs"]},
        {"eval_batch_size": 4},
        "include_for_metrics=['loss', 'inputs']: inputs that are gathered on the GPU besides the logits are not "
        "simulated",
    ),
    (
        {"predict_with_generate": True, "generation_config": "folder"},
        {},
        "generation_config='folder' is not read; expected a GenerationConfig or None. "
        "Pass GenerationConfig.from_pretrained(path)",
    ),
]


@pytest.mark.parametrize(("attributes", "overrides", "message"), NOT_SIMULATED, ids=lambda value: str(value)[:30])
def test_arguments_that_are_not_simulated(
    tmp_path: Any, attributes: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    args = tiny.arguments(tmp_path)
    vars(args).update(attributes)
    if overrides:
        assert estimate_from_arguments(tiny.bert_config(), args, 8).settings.eval_batch_size is None
    with pytest.raises(NotEstimableError) as error:
        estimate_from_arguments(tiny.bert_config(), args, 8, **overrides)
    assert str(error.value) == f"not estimable: {message}"


TOKENS = "Pass lengths=token_lengths(dataset)"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        *(
            (empty, f"lengths={empty!r} is empty; expected the tokens of at least one example. {TOKENS}")
            for empty in ([], (), np.array([], np.int32))
        ),
        ([0], f"lengths=[0] are no numbers of tokens; expected integers of 1 or more. {TOKENS}"),
        (["8"], f"lengths=['8'] are no numbers of tokens; expected integers of 1 or more. {TOKENS}"),
    ],
    ids=repr,
)
def test_lengths_without_tokens_are_refused(tmp_path: Any, lengths: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        estimate_from_arguments(tiny.bert_config(), tiny.arguments(tmp_path), lengths)
    assert str(error.value) == message


def test_what_are_no_arguments_is_refused() -> None:
    with pytest.raises(TypeError) as error:
        estimate_from_arguments(tiny.bert_config(), {"bf16": True}, 8)  # type: ignore[arg-type]
    assert str(error.value) == (
        "args={'bf16': True} are not TrainingArguments; expected those of the Trainer. Pass trainer.args"
    )


# ---- The names of TrainingArguments as settings ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # transformers 5.23.0 has a new name
@pytest.mark.parametrize(
    "given",
    [
        *({"bf16": True}, {"bf16": False}, {"fp16": True}, {"fp16": True, "bf16": False}),
        *({"gradient_checkpointing": True}, {"gradient_checkpointing": False}),
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"per_device_eval_batch_size": 3},
        {"optim": "adafactor", "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    ],
    ids=str,
)
def test_a_spelling_means_what_training_arguments_mean_by_it(given: dict[str, Any], tmp_path: Any) -> None:
    evaluates = {"eval_strategy": "epoch"} if "per_device_eval_batch_size" in given else {}
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **given, **evaluates)
    expected = estimate_from_arguments(tiny.bert_config(), arguments, 8).settings
    assert StepSettings(precision="fp32", optim=expected.optim).replace(**given) == expected


OPTIONS = {"use_reentrant": True}


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": OPTIONS},
            {"checkpointing": OPTIONS},
        ),
        ({"activation_checkpointing": False}, {"checkpointing": False}),
        ({"tf32": True}, {"precision": "tf32"}),
        ({"tf32": True, "bf16": True}, {"precision": "bf16"}),  # of what autocast leaves in float32
        ({"bf16": None, "optim": "sgd"}, {"optim": "sgd"}),
        (
            {"offload": True, "world_size": 2, "strategy": "fsdp2"},  # its name up to 0.3.0
            {"offload_params": True, "world_size": 2, "strategy": "fsdp2"},
        ),
    ],
)
def test_other_names_of_a_setting(given: dict[str, Any], own: dict[str, Any]) -> None:
    assert StepSettings().replace(**given) == StepSettings(**own)


def test_estimate_takes_the_batch_by_either_name_and_8_by_default() -> None:
    given: tuple[dict[str, Any], ...] = ({}, {"batch_size": 2}, {"per_device_train_batch_size": 2})
    assert [estimate(tiny.bert_config(), seq_len=8, **one).batch_size for one in given] == [8, 2, 2]


TWO_VALUES = "are the same setting with two values; expected one of them. Pass"
NO_SETTING = "is not a setting of a step"
MISNAMED: list[tuple[dict[str, Any], str]] = [
    (
        {"bf16": True, "fp16": True},
        "bf16=True, fp16=True are incompatible: autocast computes in one of them; expected only one. "
        "Pass precision='bf16'",
    ),
    ({"bf16": True, "precision": "fp16"}, f"bf16=True, precision='fp16' {TWO_VALUES} precision='fp16' alone"),
    (
        {"batch_size": 2, "per_device_train_batch_size": 4},
        f"per_device_train_batch_size=4, batch_size=2 {TWO_VALUES} batch_size=2 alone",
    ),
    (
        {"gradient_checkpointing_kwargs": OPTIONS},
        "gradient_checkpointing_kwargs={'use_reentrant': True} has no effect without gradient_checkpointing=True; "
        "expected both. Pass gradient_checkpointing=True",
    ),
    (
        {"learning_rate": 0.1},
        f"learning_rate=0.1 {NO_SETTING}: this argument of TrainingArguments does not change the memory of a step; "
        "expected only those that do. Remove learning_rate",
    ),
    (
        {"torch_compile": True},
        f"torch_compile=True {NO_SETTING}: what the compiler fuses and saves is decided on the GPU; expected a set-up "
        "without it. Remove torch_compile",
    ),
    ({"load_in_4bit": True}, f"load_in_4bit=True {NO_SETTING}; expected another name for it. Pass load_in='nf4'"),
    (
        {"preset": "4gb-gpu"},
        f"preset='4gb-gpu' {NO_SETTING}; expected another name for it. "
        "Pass recipe=hf_memopt.recipe('4gb-gpu') to estimate()",
    ),
    (
        {"peft_config": {"x" * 100: 1}},
        f"peft_config=<dict> {NO_SETTING}; expected another name for it. Pass lora=16, or lora=LoraConfig(...)",
    ),
    (
        {"quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True)},
        f"quantization_config=<BitsAndBytesConfig> {NO_SETTING}; expected load_in, or a configuration that has it. "
        "Pass load_in='nf4', lora=16; or set config.quantization_config and pass model=config",
    ),
]


@pytest.mark.parametrize(("given", "message"), MISNAMED, ids=lambda value: str(value)[:30])
def test_a_setting_by_another_name_or_with_two_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        estimate(tiny.bert_config(), seq_len=8, **given)
    assert str(error.value) == message
