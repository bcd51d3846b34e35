"""Check that a model can train on texts in one row, as stock's ``DataCollatorWithFlattening`` joins them.

Nothing in a model says whether its attention keeps such texts apart: many models read that off ``position_ids``, which
start again with every text, others ignore them (BLOOM, Falcon) or have layers that run across texts (Mamba, the
convolutions of LFM2). So the model itself is asked, with three texts of a few tokens: the logits of the second do not
change at all when its neighbours do, and are those of the text alone. The kernel in use is asked, whichever it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_memopt.binding.model import IGNORED_LABEL, is_causal_lm, unwrap_model
from hf_memopt.binding.model_changes import REPACKS
from hf_memopt.binding.undo import KeptState, RandomState, set_attribute

if TYPE_CHECKING:
    from transformers import Trainer

LENGTHS = (6, 8, 7)  # tokens of the texts, of which the second is asked
LARGEST_DEVIATION = 0.1  # of the logits from those of the text alone: above rounding in 16 bits, below other positions


def check_flattened_texts(trainer: Trainer, inner: Callable[[Any], Any]) -> None:
    """Raise ValueError unless the trainer's model trains on the rows of ``inner`` as on padded texts.

    With FSDP and DeepSpeed, which give the model its weights only when training begins, it warns instead.

    Raises:
        ValueError: the model takes no such row, its texts see each other there or get other positions, its loss counts
            the label of a first token, or ``inner`` gives that a label.
    """
    model = trainer.model
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        warnings.warn(
            f"attach could not check whether {_name(model)} keeps the texts of a flattened batch apart, since its "
            "weights are sharded; expected a check with whole weights. Run attach(trainer) once in a process without "
            "FSDP and DeepSpeed.",
            stacklevel=2,
        )
        return
    with undisturbed(trainer, cast(nn.Module, model)):
        reason = _why_not(trainer, inner)
    if reason is not None:
        raise ValueError(f"inner={type(inner).__name__} joins the texts of a batch into one row, {reason}")


@contextmanager
def undisturbed(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode; leave modes, random numbers and what the model's modules keep as they were.

    A buffer above ``LARGEST_COPY_BYTES`` is watched but not copied, and a warning names it if it has changed.
    """
    modes = {module: module.training for module in model.modules()}
    kept, drawn = KeptState(), RandomState.capture(trainer.args.device)
    for owner in (trainer, *modes):
        kept.look_at(owner)
    with ExitStack() as stack:
        stack.callback(kept.restore)
        stack.callback(drawn.restore)
        for module, training in modes.items():
            stack.callback(setattr, module, "training", training)
            module.training = False  # not eval(), which a user's module may use to rewrite its weights
            if getattr(module, REPACKS, False):
                stack.callback(set_attribute(module, REPACKS, False).remove)
        yield


def _why_not(trainer: Any, inner: Callable[[Any], Any]) -> str | None:
    """Return what is wrong with flattened texts, what is expected and what to do, or None."""
    name, start, end = _name(trainer.model), LENGTHS[0], LENGTHS[0] + LENGTHS[1]  # of the second text in the row
    try:
        before, text, after = _texts(unwrap_model(trainer.model))
        row, others, reversed_text = (
            inner([{"input_ids": ids} for ids in texts])
            for texts in (
                (before, text, after),
                (before[::-1], text, after[::-1]),
                (before, text[::-1], after),
            )
        )
        labels = row["labels"][0, [0, start, end]]
        alone = _logits(trainer, {"input_ids": torch.tensor([text])})
        among, among_others = _logits(trainer, row)[start:end], _logits(trainer, others)[start:end]
        of_first = _loss_of_label(trainer, row, start), _loss_of_label(trainer, reversed_text, start)
    except Exception as error:  # whatever the model raises for inputs that it does not take
        return (
            f"which {name} could not be trained on ({type(error).__name__}: {error}); expected a causal language model "
            f"that takes position_ids. {_pad_instead(trainer)}"
        )
    if labels.ne(IGNORED_LABEL).any():
        return (
            f"with labels {labels.tolist()} for their first tokens; expected {IGNORED_LABEL}, as nothing predicts "
            f"them. Call: DataCollatorWithFlattening(separator_id={IGNORED_LABEL})"
        )
    if not torch.equal(among, among_others):
        return _leak(trainer, name)
    if of_first[0] != of_first[1]:
        return (
            f"and leaves out the label of their first tokens, which the loss of {name} counts; expected a causal "
            f"language model. {_pad_instead(trainer)}"
        )
    if bool((among - alone).norm() > LARGEST_DEVIATION * alone.norm()):
        return (
            f"where {name} does not compute what it computes for a text alone, as with other positions; expected the "
            "same. Call: DataCollatorWithFlattening(position_ids_start=2) if it counts positions from 2; else "
            f"{_pad_instead(trainer)}"
        )
    return None


def _leak(trainer: Any, name: str) -> str:
    config = getattr(unwrap_model(trainer.model), "config", None)
    attention = getattr(config, "_attn_implementation", None)
    seen = f"where those of {name} see each other (attention: {attention!r})"
    if getattr(config, "use_cache", False):
        return (
            f"{seen}, as models that return a cache ignore where position_ids start again; expected use_cache=False. "
            "Pass TrainingArguments(..., use_cache=False)"
        )
    return f"{seen}; expected a model whose layers keep apart what position_ids count anew. {_pad_instead(trainer)}"


def _logits(trainer: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the logits of the model's one row around their mean at each token, shape (seq, vocabulary)."""
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    found: torch.Tensor = _outputs(trainer, inputs).logits[0].float()
    return found - found.mean(dim=-1, keepdim=True)


def _loss_of_label(trainer: Any, row: Mapping[str, Any], position: int) -> float:
    """Return the model's loss where one position alone has a label, always the same."""
    labels = torch.full_like(row["labels"], IGNORED_LABEL)
    labels[0, position] = 0
    config = getattr(unwrap_model(trainer.model), "config", None)
    with set_attribute(config, "output_router_logits", False):  # the loss of a router is over all tokens of a batch
        return float(_outputs(trainer, {**row, "labels": labels}).loss)


def _outputs(trainer: Any, inputs: Mapping[str, Any]) -> Any:
    with torch.no_grad(), trainer.compute_loss_context_manager():
        return trainer.model(**send_to_device(dict(inputs), trainer.args.device))


def _texts(model: Any) -> list[list[int]]:
    """Return three texts of tokens that mean nothing special to the model."""
    config = getattr(model, "config", None)
    named = vars(config) if config is not None else {}
    special = {value for name, value in named.items() if name.endswith("token_id") and isinstance(value, int)}
    vocabulary = len(model.get_input_embeddings().weight)
    usable = [token for token in range(min(vocabulary, 1000)) if token not in special]
    tokens = iter(usable[-1 - 7 * i % len(usable)] for i in range(sum(LENGTHS)))
    return [[next(tokens) for _ in range(length)] for length in LENGTHS]


def _pad_instead(trainer: Any) -> str:
    labels = ", causal_lm=True" if is_causal_lm(trainer.model) else ""
    return f"Pad instead: BucketedCollator(tokenizer{labels})"


def _name(model: Any) -> str:
    return type(unwrap_model(model)).__name__
