"""``StepSettings``: the settings that affect the memory of a training step, named as in ``TrainingArguments``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from hf_memopt.plain_data import Count, CountOrZero, check_value, shown
from hf_memopt.prediction.memory.settings.argument_spellings import in_own_names, unknown_setting
from hf_memopt.technique_list import NO_OVERLAP, asked_by
from hf_memopt.training.binding.compatibility import refusal_of, refuse_without_adapters, steps_in_backward

if TYPE_CHECKING:
    from peft import LoraConfig

    from hf_memopt.prediction.memory.optimizers import OptimizerMemory, ParameterFacts


class NotEstimableError(ValueError):
    """A set-up that cannot be simulated; the message begins with "not estimable: "."""


def _setting(default: Any, kind: Any = None, *, changes: str = "model", hash: bool | None = None) -> Any:
    """Declare a setting, whose values are checked against the annotation ``kind``, unless ``__post_init__`` does more.

    Another value ``changes`` the "model", which has to be prepared anew, the "trace" of a step, or only the "replay".
    """
    return field(default=default, hash=hash, metadata={"kind": kind, "changes": changes})


def prepare_model_for_kbit_training(model: Any) -> None:
    """Cast as PEFT's function of this name: what bitsandbytes did not quantise becomes float32. ``prepare="peft"``."""
    for parameter in model.parameters():
        if str(parameter.dtype) in ("torch.float16", "torch.bfloat16") and type(parameter).__name__ != "Params4bit":
            parameter.data = parameter.data.float()


@dataclass(frozen=True)
class StepSettings:
    """The settings that affect memory. Names and meanings are those of ``TrainingArguments`` where it has them.

    Attributes:
        precision: of the autocast region; ``"auto"`` follows the GPU, ``"tf32"`` needs as much memory as fp32.
        weights_dtype: of the weights as loaded; 16 bits without autocast is "pure" 16-bit training. A module keeps its
            own, which an ``Estimate`` of it shows here (of mixed weights, the dtype that most bytes have). With
            ``load_in`` that of the weights that are not quantised.
        autocast_cache: whether autocast keeps the 16-bit copy of each trainable weight through a forward pass.
        optim: a name that ``TrainingArguments(optim=...)`` accepts.
        optim_args: extra arguments as text, as in ``TrainingArguments(optim_args=...)``.
        weight_decay: some optimizers copy the gradients for it.
        embedding_bits: bits of the embeddings' state in an 8-bit optimizer.
        rounding: of weights in bfloat16 after an update: ``"nearest"`` as the plain optimizer, or ``"stochastic"`` or
            ``"kahan"`` as ``low_memory_optimizer``, with its temporaries and its buffer. Nothing for float32 weights.
        gradient_release: whether each parameter steps, and frees its gradient, as soon as it has one.
        streamed: whether the weights of the layers wait in host memory, as with ``stream_layers``. Their gradients are
            parked there and the optimizer steps there; with ``gradient_release`` each layer steps on the GPU.
        embeddings_on_host: whether, with ``streamed``, tokens are looked up on the host, where the embeddings step.
        resident: with ``streamed``, how many layers stay on the GPU, spread evenly over all.
        optimizer_state_on_host: whether optimizer state waits in host memory and visits the GPU in chunks, as with
            ``OptimizerStateOnHostCallback()``, whose default chunks it has.
        tiled: whether MLPs and experts run over tiles of positions, as with ``hf_memopt.techniques.tile_layers``.
        tile_tokens: with ``tiled``, the tokens of a tile; None for the model's width, at least 1024.
        sparse_tied_embedding: whether the gradient of tied input embeddings is added into the head's as rows, as
            ``sparse_tied_embedding`` does.
        fused_cross_entropy: whether the loss is computed without the logits, as ``fuse_cross_entropy`` does.
            Every position counts as labelled.
        max_grad_norm: 0 (or less, as in the Trainer) for no clipping.
        gradient_accumulation_steps: batches of ``batch_size`` examples per optimizer step.
        micro_batch_size: examples of one forward pass, where a batch of a known loss is cut; None for the whole batch.
        checkpointing: whether activations are recomputed; a mapping for the options of
            ``activation_checkpointing_kwargs`` (``every_n_layers``, ``offload``, ``use_reentrant``, ``context_fn``).
        label_smoothing_factor: 0 for the model's own loss, below 1.
        attn_implementation: None for the model's own.
        padding: whether batches contain padding, so that attention needs a mask of all pairs of tokens; None where
            batches of several rows do. Pass False for rows of one length, whose mask a real run leaves out.
        eval_batch_size: examples of an evaluation batch; None for no evaluation.
        eval_batches: the number of evaluation batches.
        prediction_loss_only: whether evaluation drops the logits (stock does without ``compute_metrics``), and with
            ``fused_cross_entropy`` makes none.
        eval_accumulation_steps: evaluation batches whose logits are gathered on the GPU; None for all of them.
        eval_do_concat_batches: whether gathered logits are concatenated, a copy at every batch, or stay a list.
        batch_eval_metrics: whether metrics are computed batch by batch, so that no logits are gathered.
        predict_with_generate: whether evaluation generates, as ``Seq2SeqTrainer`` does, and gathers tokens, not logits.
        generation_max_length: tokens to generate at most; None for the model's own limit (20 unless it has one), which
            is read of a folder's ``generation_config.json``, and not of well-known names.
        generation_num_beams: beams of the search; None for the model's own number, as above.
        torch_empty_cache_steps: steps between two calls of ``torch.cuda.empty_cache()``.
        expandable_segments: whether the allocator runs with ``expandable_segments:True``.
        load_in: what bitsandbytes quantises the linears to: ``"nf4"`` (4 bits, double quantisation, as in QLoRA) or
            ``"int8"`` (LLM.int8); None for weights as they are. Needs adapters, as in the Trainer. The head stays as it
            is: a language model's as in ``from_pretrained``, a classifier's as with ``llm_int8_skip_modules``.
        lora: the adapters that PEFT adds: their rank, for all linear layers but the head (a classifier's is trained
            whole), or a ``peft.LoraConfig``; None for none. They are float32, as ``get_peft_model`` makes them.
        lora_targets: with a rank, the last parts of the names of the layers that get adapters, such as
            ``("q_proj", "v_proj")``; ``"auto"`` for all linear layers but the head.
        quantize_experts: with ``load_in="nf4"``, whether fused experts are in 4 bits too, as with ``ExpertsConfig``.
        freeze: patterns of parameters that are not trained, as ``hf_memopt.techniques.freeze`` takes them.
        prepare: functions that change the model, the same as in the real run, after all of the above; ``"peft"`` where
            PEFT's ``prepare_model_for_kbit_training`` runs, which by default switches ``checkpointing`` on.
        images: pictures of an example, of a model that reads them with text; 0 for rows of text alone. None for one, of
            a class that is a causal LM too (Gemma 3) for none.
        image_size: pixels of a picture's side; None for the configuration's, or 448 of a model that takes any size.
        audio_seconds: of an example, at 16 kHz; None for 10, and of Whisper, whose audio has one length, nothing else.
        loop: ``"trainer"`` for the stock ``Trainer``; ``"manual"`` for a hand-written loop, with Accelerate or without,
            that does ``outputs = model(**batch); outputs.loss.backward(); optimizer.step(); optimizer.zero_grad()``.
            Its variable keeps logits and key-value cache until the next forward pass is over, the model keeps its own
            ``use_cache``, and one batch is on the GPU at a time. ``"function"`` for such a loop that calls a function
            for each batch, as ``train_step(batch)``: its return, after the optimizer's step, frees the outputs.
        optimizer_memory: a function that returns the memory of an optimizer that ``optim`` does not name, from the
            facts of the trainable parameters; it replaces ``optim`` and its options. None for ``optim``.
        zero_grad_to_none: False where gradients are zeroed and kept between steps, ``zero_grad(set_to_none=False)``.
        cublas_workspace_bytes: of each thread's cuBLAS handle, as ``CUBLAS_WORKSPACE_CONFIG`` sets it; 0 where torch
            allocates none (ROCm), None for what torch takes on this GPU.
    """

    precision: str = _setting("auto", Literal["auto", "fp32", "tf32", "bf16", "fp16"], changes="trace")
    weights_dtype: str = _setting("float32", Literal["float32", "bfloat16", "float16"])
    autocast_cache: bool = _setting(True, changes="trace")
    optim: str = _setting("adamw_torch_fused", str, changes="replay")
    optim_args: str | None = _setting(None, str | None, changes="replay")
    weight_decay: float = _setting(0.0, changes="replay")
    embedding_bits: int = _setting(32, Literal[8, 32], changes="replay")
    rounding: str = _setting("nearest", Literal["nearest", "stochastic", "kahan"], changes="replay")
    gradient_release: bool = _setting(False, bool, changes="replay")
    streamed: bool = _setting(False, bool, changes="trace")
    embeddings_on_host: bool = _setting(False, bool, changes="trace")
    resident: int = _setting(0, CountOrZero, changes="trace")
    optimizer_state_on_host: bool = _setting(False, bool, changes="replay")
    tiled: bool = _setting(False, bool)
    tile_tokens: int | None = _setting(None, Count | None)
    sparse_tied_embedding: bool = _setting(False, bool)
    fused_cross_entropy: bool = _setting(False, bool)
    max_grad_norm: float = _setting(1.0, float, changes="replay")
    gradient_accumulation_steps: int = _setting(1, Count, changes="replay")
    micro_batch_size: int | None = _setting(None, Count | None, changes="trace")
    checkpointing: bool | Mapping[str, Any] = _setting(False, changes="trace", hash=False)  # around the recording
    label_smoothing_factor: float = _setting(0.0, float, changes="trace")
    attn_implementation: str | None = _setting(None, str | None)
    padding: bool | None = _setting(None, bool | None, changes="trace")
    eval_batch_size: int | None = _setting(None, Count | None, changes="trace")
    eval_batches: int = _setting(1, Count, changes="replay")
    prediction_loss_only: bool = _setting(False, bool, changes="trace")
    eval_accumulation_steps: int | None = _setting(None, Count | None, changes="replay")
    eval_do_concat_batches: bool = _setting(True, changes="replay")
    batch_eval_metrics: bool = _setting(False, changes="replay")
    predict_with_generate: bool = False
    generation_max_length: int | None = _setting(None, Count | None)
    generation_num_beams: int | None = _setting(None, Count | None)
    torch_empty_cache_steps: int | None = _setting(None, Count | None, changes="replay")
    expandable_segments: bool = _setting(False, changes="replay")
    load_in: str | None = _setting(None, Literal["nf4", "int8"] | None)
    lora: int | LoraConfig | None = _setting(None, hash=False)
    lora_targets: str | tuple[str, ...] = "auto"
    quantize_experts: bool = _setting(False, bool)
    freeze: tuple[str, ...] = ()
    prepare: tuple[Callable[[Any], Any], ...] = ()
    images: int | None = _setting(None, CountOrZero | None, changes="trace")
    image_size: int | None = _setting(None, Count | None, changes="trace")
    audio_seconds: float | None = _setting(None, float | int | None, changes="trace")
    loop: str = _setting("trainer", Literal["trainer", "manual", "function"])
    optimizer_memory: Callable[[Sequence[ParameterFacts]], OptimizerMemory] | None = _setting(
        None, Callable | None, changes="replay"
    )
    zero_grad_to_none: bool = _setting(True, changes="trace")
    cublas_workspace_bytes: int | None = _setting(None, CountOrZero | None, changes="replay")

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.metadata.get("kind") is not None:
                check_value(item.name, getattr(self, item.name), item.metadata["kind"], item.default)
        offload = self.checkpointing_options.get("offload")
        if isinstance(offload, str) and offload == "overlapped":
            raise ValueError(NO_OVERLAP)
        if not 0 <= self.label_smoothing_factor < 1:
            raise ValueError(
                f"label_smoothing_factor={shown(self.label_smoothing_factor)} is invalid; expected a number from 0 to "
                "below 1. Pass label_smoothing_factor=0.1"
            )
        if self.audio_seconds is not None and not self.audio_seconds > 0:
            raise ValueError(
                f"audio_seconds={shown(self.audio_seconds)} is invalid; expected more than 0. Pass audio_seconds=10"
            )
        prepare: Any = self.prepare
        if isinstance(prepare, str) and prepare == "peft":
            object.__setattr__(self, "prepare", (prepare_model_for_kbit_training,))
        functions = self.prepare if isinstance(self.prepare, tuple | list) else (None,)
        if not all(map(callable, functions)):
            raise ValueError(
                f"prepare={shown(self.prepare)} is invalid; expected a tuple of functions that change the model, "
                "or 'peft'. Pass prepare=(function,)"
            )
        if self.rounding != "nearest" and self.weights_dtype == "float16":
            raise ValueError(
                f"rounding={self.rounding!r}, weights_dtype='float16' are incompatible: float16 gradients need a "
                "scaler, which needs float32 weights; expected bfloat16. Pass weights_dtype='bfloat16'"
            )
        self._read_freeze()
        self._read_lora()
        self._check_needed()
        if not self.prepare:  # which may add adapters
            refuse_without_adapters(self.load_in, self.lora)
        self._check_conflicts()
        self._check_stock()

    def _read_lora(self) -> None:
        """Check the adapters, and keep a copy of a ``LoraConfig``, which may change later (PEFT changes it itself)."""
        # a LoraConfig is recognised without importing peft, which takes seconds
        if getattr(self.lora, "peft_type", None) == "LORA":
            object.__setattr__(self, "lora", copy.deepcopy(self.lora))
        elif self.lora is not None and (isinstance(self.lora, bool) or not isinstance(self.lora, int) or self.lora < 1):
            raise ValueError(
                f"lora={shown(self.lora)} is invalid; expected a rank of 1 or more, a peft.LoraConfig, or None. "
                "Pass lora=16"
            )
        targets: Any = self.lora_targets
        if isinstance(targets, list):
            object.__setattr__(self, "lora_targets", tuple(targets))
        check_value("lora_targets", self.lora_targets, Literal["auto"] | tuple[str, ...], "auto")
        if self.lora_targets != "auto" and not isinstance(self.lora, int):
            raise ValueError(
                f"lora_targets={self.lora_targets!r}, lora={shown(self.lora)} do not fit each other; expected a rank "
                "as lora. Pass lora=16, or LoraConfig(target_modules=...) alone"
            )

    @property
    def can_scale_loss(self) -> bool:
        """Whether float16 can be trained: released gradients cannot wait for the scaler."""
        return not self.gradient_release

    @property
    def steps_in_backward(self) -> bool:
        """Whether each parameter steps within the backward pass, and frees its gradient there."""
        return self.gradient_release or steps_in_backward(self.optim)

    @property
    def checkpointing_options(self) -> Mapping[str, Any]:
        """The options of ``checkpointing``; none where it is a bool."""
        return self.checkpointing if isinstance(self.checkpointing, Mapping) else {}

    def _check_needed(self) -> None:
        """Refuse a setting without the one that it needs."""
        needed = (  # the setting, what it needs, whether that is missing, why
            ("embeddings_on_host", "streamed", not self.streamed, "embeddings wait on the host beside streamed layers"),
            ("resident", "streamed", not self.streamed, "all layers stay where none is streamed"),
            ("tile_tokens", "tiled", not self.tiled, "nothing runs in tiles"),
            (
                "quantize_experts",
                "load_in",
                self.load_in != "nf4",
                "experts are put into 4 bits where linear layers are",
            ),
        )
        for name, other, is_missing, why in needed:
            if getattr(self, name) and is_missing:
                fix = "load_in='nf4', lora=16" if other == "load_in" else f"{other}=True"
                raise ValueError(
                    f"{name}={getattr(self, name)!r}, {other}={getattr(self, other)!r} do not fit each other: {why}; "
                    f"expected both. Pass {fix}"
                )

    def _read_freeze(self) -> None:
        """Make a tuple of the patterns. Whether they match is known when there is a model."""
        given: Any = self.freeze  # one pattern too, or a list
        patterns = (given,) if isinstance(given, str) else given
        if not isinstance(patterns, tuple | list) or not all(isinstance(name, str) and name for name in patterns):
            raise ValueError(
                f"freeze={shown(self.freeze)} is invalid; expected a pattern of FreezeCallback, or a tuple of them. "
                "Pass freeze=('embeddings',)"
            )
        object.__setattr__(self, "freeze", tuple(patterns))

    def _check_conflicts(self) -> None:
        """Refuse what the table of conflicts does, so that ``attach`` would in a real run."""
        techniques = {name: (one, one.field_in(self)) for name, one in asked_by(self).items()}
        settings = {  # by the table's name: the field, whether it is in use, a value that switches it off
            **{name: (field, True, one.fields[field]) for name, (one, field) in techniques.items()},
            "norm clipping": ("max_grad_norm", self.max_grad_norm > 0, 0),
            "accumulation": ("gradient_accumulation_steps", self.gradient_accumulation_steps > 1, 1),
            "fp16": ("precision", self.precision == "fp16", "bf16"),
            "reentrant checkpointing": ("checkpointing", bool(self.checkpointing_options.get("use_reentrant")), True),
            "paged optimizer": ("optim", self.optim.startswith("paged_"), "adamw_torch_fused"),
            "layer-wise optimizer": ("optim", steps_in_backward(self.optim), "adamw_torch_fused"),
        }
        for one, other in combinations((what for what, (_, is_used, _) in settings.items() if is_used), 2):
            refusal = refusal_of(one, other)
            if refusal is not None:
                (name, _, off), (second, _, second_off) = settings[one], settings[other]
                raise ValueError(
                    f"{name}={getattr(self, name)!r}, {second}={getattr(self, second)!r} are incompatible: "
                    f"{refusal.reason}; expected only one of them. Pass {second}={second_off!r}, or {name}={off!r}"
                )

    def _check_stock(self) -> None:
        """Refuse optimizers that step within the backward pass where stock's own run would stop."""
        by_layer = self.optim.endswith("_layerwise")
        if by_layer and self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"optim={self.optim!r}, gradient_accumulation_steps={self.gradient_accumulation_steps!r} are "
                "incompatible: each layer steps within the backward pass, and stock Trainer refuses it; expected "
                "gradient_accumulation_steps=1. Pass gradient_accumulation_steps=1"
            )
        # By layer, the scaler gets a stand-in without gradients ("No inf checks were recorded for this optimizer",
        # first step). With LOMO accelerate never updates the scaler, so clipping unscales again ("unscale_() has
        # already been called", second step); without clipping it runs.
        clipped_lomo = self.optim in ("lomo", "adalomo") and self.max_grad_norm > 0
        if self.precision == "fp16" and (by_layer or clipped_lomo):
            raise ValueError(
                f"optim={self.optim!r}, precision='fp16' are incompatible: each parameter steps within the backward "
                "pass, and the gradient scaler then stops the run; expected bf16 or fp32. Pass precision='bf16', or "
                "another optimizer"
            )

    def replace(self, **changed: Any) -> StepSettings:
        """Return the settings with other values; ``bf16=True`` and such names of ``TrainingArguments`` work too.

        Raises:
            TypeError: a name is not a setting; the message suggests the closest one.
        """
        changed = in_own_names(changed)
        known = [item.name for item in fields(self)]
        if "quantization_config" in changed:
            raise TypeError(
                f"quantization_config=<{type(changed['quantization_config']).__name__}> is not a setting of a step; "
                "expected load_in, or a configuration that has it. Pass load_in='nf4', lora=16; or set "
                "config.quantization_config and pass model=config"
            )
        for name in changed:
            if name not in known:
                raise unknown_setting(name, changed[name], known)
        return replace(self, **changed)
