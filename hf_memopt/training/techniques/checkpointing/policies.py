"""Recompute activations instead of keeping them, in the layers that a one-word policy names.

Gradients stay what they are, bit by bit: dropout draws the same numbers again, and running statistics of ``BatchNorm``
count a batch once (stock's own checkpointing counts it twice). By
``python benchmarks/checkpointing.py``, of what BERT-large saves (32 texts of 128 tokens, bf16 autocast) ``"full"``
leaves 9 % for 33 % more operations in the step, ``"every_2"`` 54 % for 17 %, and ``"selective"`` 46 % for 0.7 %.

Stock ``TrainingArguments`` can ask for ``"full"`` and ``"every_2"``. ``"selective"`` needs a function, which would make
them unserialisable; so a callback switches the policy on when training begins.

Limitations: no reentrant checkpointing, and no choice of a policy for a memory budget.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memopt.changes import Change
from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import check_value, shown
from hf_memopt.technique_list import NO_OVERLAP
from hf_memopt.training.binding import checkpointing_of, enable_checkpointing, versions
from hf_memopt.training.binding.compatibility import check_settings
from hf_memopt.training.binding.model import unwrap_model
from hf_memopt.training.binding.model_changes import drop_input_gradients, input_gradient_hooks
from hf_memopt.training.binding.parameters import StillStatistics, layer_stacks
from hf_memopt.training.binding.undo import UndoHandle, override_method, set_attribute, undo_all
from hf_memopt.training.techniques import TechniqueCallback
from hf_memopt.training.techniques.checkpointing.selective import activation_memory_budget, selective_contexts

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

logger = logging.getLogger(__name__)

_FORMS = ("full", "every_2", "first_8", "selective", "budget_0.5")
_COUNTED = re.compile(r"(every|first)_([1-9]\d*)")
_BUDGET = re.compile(r"budget_(0(?:\.\d+)?|1(?:\.0+)?)")
_STATE = ("gradient_checkpointing", "_gradient_checkpointing_func")  # transformers 5.8.1, 5.17.0 and 5.23.0


def checkpoint_layers(model: Any, policy: str = "full", *, offload: bool = False, compiled: bool = False) -> UndoHandle:
    """Recompute activations in the backward pass, in the layers and for the operations that ``policy`` names.

    A policy is one of:

    - ``"full"``: of every layer only the input is kept;
    - ``"every_2"``: the same in every second layer, counted as stock's ``every_n_layers`` through the whole model;
    - ``"first_8"``: the same in the first 8 layers of each stack (``layer_stacks``; encoder and decoder alike). The
      activations of the first layers live longest;
    - ``"selective"``: in every layer the results of linear layers and of fused attention are kept too, and the rest is
      recomputed (``selective``). Attention with dropout is recomputed as well, so that the dropouts after it draw the
      same numbers again.

    Whatever was switched on before is replaced. The hooks that stock puts on the embeddings for reentrant checkpointing
    are taken off (``drop_input_gradients``), so a frozen prefix keeps what it saves; of a model with PEFT adapters they
    stay.

    Args:
        model: of transformers, or wrapped by PEFT.
        policy: as above.
        offload: True to keep the inputs of the layers in the host's memory: stock's ``offload``.
        compiled: whether the model will be compiled, which takes no care for ``BatchNorm``: running statistics then
            count a batch twice, as with stock's checkpointing.

    Returns:
        A handle whose ``remove()`` restores the model; it does not keep the model alive.

    Raises:
        ValueError: an unknown policy; the model cannot be checkpointed, or not by layer; the policy counts more layers
            than it has; ``offload`` together with ``"selective"``, without an accelerator or in transformers before
            5.17. The model is unchanged then.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=3)
        >>> model = LlamaForCausalLM(config)
        >>> handle = checkpoint_layers(model, "first_2")
        >>> [layer.gradient_checkpointing for layer in model.model.layers]
        [True, True, False]
        >>> handle.remove(); model.model.layers[0].gradient_checkpointing
        False
    """
    parsed = _parsed(policy, offload)
    _check_model(model, parsed)
    if offload:
        on_cpu = any(parameter.device.type == "cpu" for parameter in model.parameters())
        check_offload(on_cpu=on_cpu)
    options: dict[str, Any] = {"use_reentrant": False, **({"offload": True} if offload else {})}
    if parsed.kind == "every":
        options["every_n_layers"] = parsed.number
    elif parsed.kind == "selective":
        options["context_fn"] = selective_contexts
    still = StillStatistics(_checkpointing_layers(model), options.get("context_fn"))
    if still.norms and not compiled:
        options["context_fn"] = still
    chosen = _chosen_layers(model, parsed)
    restore = undo_all(
        *(
            set_attribute(module, name, getattr(module, name, None))
            for module in model.modules()
            if hasattr(module, "gradient_checkpointing")
            for name in _STATE
        )
    )
    had_hooks = bool(input_gradient_hooks(model))
    enable_checkpointing(model, options)
    for layer in _checkpointing_layers(model):
        if chosen is not None:  # stock has no first layers, and every n-th one only from 5.17 on
            layer.gradient_checkpointing = layer in chosen
        _clear_flags_within(layer)
    drop_input_gradients(model)
    reference = weakref.ref(model)

    def undo() -> None:
        restore.remove()
        alive = reference()
        if alive is not None and had_hooks != bool(input_gradient_hooks(alive)):
            (alive.enable_input_require_grads if had_hooks else alive.disable_input_require_grads)()

    return UndoHandle(undo)


class CheckpointingCallback(TechniqueCallback):
    """Recompute activations in the backward pass: call ``checkpoint_layers`` when training begins.

    ``TrainingArguments(activation_checkpointing=...)`` stays False; if it is set, this policy replaces it. The model
    keeps the policy after training, as it does with stock; ``handle.remove()`` undoes it. It logs no keys.

    Args:
        policy: as ``checkpoint_layers`` takes it, or ``"budget_0.5"`` with the fraction for
            ``activation_memory_budget``, which needs ``torch_compile=True`` and ``attach`` and is set only within
            training steps.
        offload: as ``checkpoint_layers`` takes it.

    Attributes:
        changes: what was replaced, one ``Change`` per kind.
        handle: undoes the changes to the last model (for a budget: to the trainer); None before the first.

    Raises:
        ValueError: an unknown policy, at once; the rest as ``checkpoint_layers`` does, when training begins; a budget
            without ``torch_compile=True``, when it is bound.
        RuntimeError: a budget that was not bound, when training begins.
    """

    technique = "checkpointing policy"

    def __init__(self, policy: str = "full", *, offload: bool = False) -> None:
        self._parsed = _parsed(policy, offload, budgets=True)
        super().__init__(policy, offload=offload)
        self.policy = policy
        self.offload = offload

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Set a budget within this trainer's training steps; other policies need no binding."""
        if self._parsed.kind != "budget":
            return super().bind(trainer)
        _check_compiled(self.policy, trainer.args)
        if self.binding.trainer is trainer:
            return self.binding.handle
        self.handle = self.binding.to(trainer, override_method(trainer, "training_step", self._within_budget))
        return self.handle

    def _within_budget(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with activation_memory_budget(self._parsed.fraction):  # read where a graph is compiled, in its forward pass
            return before(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Switch the policy on in the model that is trained."""
        super().on_train_begin(args, state, control)
        check_settings(self.technique, args)
        if self._parsed.kind == "budget":
            _check_compiled(self.policy, args)
            self.binding.serving(self, state)
            return
        if self._handles.model is model:
            self._handles.remove()  # a second train() with the same model: one undo has to be enough
        compiled = versions.is_compiled(args)
        handle = checkpoint_layers(model, self.policy, offload=self.offload, compiled=compiled)
        self.handle = self._handles.keep(model, handle)
        is_asked, options = checkpointing_of(args)
        reason = "the callback replaces the arguments' own" if is_asked else "CheckpointingCallback"
        self.note(Change("checkpointing", (options or "full") if is_asked else False, self.policy, reason), logs=False)
        layers = list(_checkpointing_layers(model))
        recomputed = sum(layer.gradient_checkpointing for layer in layers)
        logger.info(f"CheckpointingCallback recomputes {recomputed} of {len(layers)} layers, by policy {self.policy!r}")


# ---- Policies -------------------------------------------------------------------------------------------------------


class _Policy(NamedTuple):
    """A policy as text and parsed: "full", "every", "first", "selective" or "budget", with its number."""

    text: str
    kind: str
    number: int = 0
    fraction: float = 1.0


def _parsed(policy: Any, offload: Any, *, budgets: bool = False) -> _Policy:
    """Return a parsed policy that goes with ``offload``; ``budgets``: whether a budget of torch.compile is accepted."""
    if isinstance(offload, str) and offload == "overlapped":
        raise ValueError(NO_OVERLAP)
    check_value("offload", offload, bool, False)
    text = policy if isinstance(policy, str) else ""
    if text == "full":
        return _Policy(text, text)
    if match := _COUNTED.fullmatch(text):
        return _Policy(text, match[1], number=int(match[2]))
    match = _BUDGET.fullmatch(text)
    if match and not budgets:
        raise ValueError(
            f"policy={policy!r} is for torch.compile, not for the layers of a model; expected 'full', 'every_<n>', "
            f"'first_<k>' or 'selective'. Pass CheckpointingCallback({policy!r}) to a Trainer with "
            f"torch_compile=True, or call: activation_memory_budget({match[1]})"
        )
    if text != "selective" and match is None:
        budget = ", 'budget_<share from 0 to 1>'" if budgets else ""
        raise ValueError(
            f"policy={shown(policy)} is unknown; expected 'full', 'selective', 'every_<n>' or 'first_<k>' with a "
            f"number from 1{budget}.{did_you_mean(policy, _FORMS)} Pass policy='full'"
        )
    if offload:
        raise ValueError(
            f"policy={policy!r}, offload=True are incompatible: what the policy keeps within the layers stays on the "
            "GPU; expected 'full', 'every_<n>' or 'first_<k>'. Pass offload=False"
        )
    return _Policy(text, "budget", fraction=float(match[1])) if match else _Policy(text, text)


def _checkpointing_layers(model: nn.Module) -> list[Any]:
    """Return the layers in the order in which stock counts them for ``every_n_layers``."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _clear_flags_within(layer: nn.Module) -> None:
    """Take the flag off the parts of a layer: the layer recomputes them.

    With the flag, T5's attention requires a gradient for a bias that needs none, as reentrant checkpointing wants it;
    that takes memory and changes the kernel, and with it the last bits of the loss.
    """
    for module in layer.modules():
        if hasattr(module, "gradient_checkpointing") and not isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = False  # type: ignore[assignment]


def _chosen_layers(model: nn.Module, policy: _Policy) -> set[nn.Module] | None:
    """Return the layers that a policy by layer recomputes; None for a policy that recomputes all."""
    if policy.kind not in ("every", "first"):
        return None
    layers = _checkpointing_layers(model)
    if policy.kind == "every":
        counted = {"": layers}
    else:
        counted = {name: [layer for layer in stack if layer in layers] for name, stack in layer_stacks(model).items()}
    most = min(map(len, counted.values()), default=0)
    if most == 0:
        raise ValueError(
            f"policy={policy.text!r} needs layers that are switched one by one, and {type(model).__name__} has no "
            "stack of transformers' GradientCheckpointingLayer; expected 'full' or 'selective'. Pass policy='full'"
        )
    if policy.number > most:
        sizes = (f"the {len(stack)} layers of {name}".removesuffix(" of ") for name, stack in counted.items())
        raise ValueError(
            f"policy={policy.text!r} exceeds {' and '.join(sizes)} of {type(model).__name__}; expected a number "
            f"from 1 to {most}. Pass policy='{policy.kind}_{most}'"
        )
    if policy.kind == "every":
        return set(layers[:: policy.number])
    return {layer for stack in counted.values() for layer in stack[: policy.number]}


def _check_model(model: Any, policy: _Policy) -> None:
    supported = getattr(model, "supports_gradient_checkpointing", False)
    if not supported or not any(hasattr(module, "gradient_checkpointing") for module in model.modules()):
        name = type(unwrap_model(model)).__name__
        raise ValueError(
            f"policy={policy.text!r} cannot be applied: {name} does not support checkpointing; "
            "expected a model of transformers with supports_gradient_checkpointing=True. Save memory otherwise, for "
            "example: freeze(model, 'embeddings'), or MicrobatchCallback(max_examples=1)"
        )


def check_offload(*, on_cpu: bool) -> None:
    """Refuse ``offload`` where transformers or the machine cannot do it; ``on_cpu`` is where the model is now."""
    if not versions.can_offload_checkpoints():
        from transformers import __version__

        raise ValueError(
            f"offload=True is not known to transformers {__version__}; expected 5.17 or newer. "
            "Call: pip install -U transformers"
        )
    if on_cpu and not torch.accelerator.is_available():
        raise ValueError(
            "offload=True moves activations from an accelerator to the host, and there is no accelerator; expected a "
            "GPU that torch can use. Pass offload=False"
        )


def _check_compiled(policy: str, args: TrainingArguments) -> None:
    if not versions.is_compiled(args):
        raise ValueError(
            f"policy={policy!r} is a choice that torch.compile makes, and torch_compile=False; expected a compiled "
            "model. Set torch_compile=True, or pass policy='selective'"
        )
