"""Keep texts in one row apart, of packed views and of stock's ``DataCollatorWithFlattening``, and check that they are.

Nothing in a model says whether it keeps such texts apart: many read that off ``position_ids``, others ignore them (OPT,
encoders), have attention of their own (BLOOM) or layers that run across texts (Mamba). So the model itself is asked, as
stock has it and with ``packed_attention``, by three texts of a few tokens: the logits of the second do not change when
its neighbours do, and are those of the text alone. In the first batch of each run no gradient may reach another text.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import DataCollatorWithFlattening

from hf_memopt.notices import notify
from hf_memopt.training.batching.collation.model_needs import first_position, has_decoder
from hf_memopt.training.batching.collation.packed_attention import pack_attention, text_bounds
from hf_memopt.training.binding.model import IGNORED_LABEL, is_causal_lm, unwrap_model
from hf_memopt.training.binding.model_changes import REPACKS
from hf_memopt.training.binding.undo import (
    KeptState,
    RandomState,
    UndoHandle,
    is_overridden,
    override_method,
    remove_all,
    set_attribute,
    undo_all,
)

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)

APART = "texts kept apart"  # the purpose of the override
MOST_LOOKED_AT = 3  # first batches of a run whose gradients are zero
LENGTHS = (6, 8, 7)  # tokens of the texts, of which the second is asked
LARGEST_DEVIATION = 0.1  # of the logits from those of the text alone: above rounding in 16 bits, below other positions


def keep_texts_apart(trainer: Trainer, inner: Callable[[Any], Any] | None = None) -> UndoHandle:
    """Let the trainer's model keep the texts of one row apart, by stock's masks or by ``pack_attention``, or refuse it.

    It is asked now, and the first batch of each run is looked at. With FSDP and DeepSpeed, which give the model its
    weights only when training begins, there is a warning instead. ``inner`` is stock's collator that joins the texts,
    with which stock's masks come first; None: a packed view.

    Raises:
        ValueError: the model takes no such row, its texts see each other there or get other positions, its loss counts
            the label of a first token, or ``inner`` gives that a label.
    """
    model = cast(nn.Module, trainer.model)
    if is_overridden(trainer, "training_step", APART):
        return undo_all()
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        warnings.warn(
            f"attach could not check whether {_name(model)} keeps the texts of a flattened batch apart, since its "
            "weights are sharded; expected a check with whole weights. Run attach(trainer) once in a process without "
            "FSDP and DeepSpeed.",
            stacklevel=2,
        )
        return (pack_attention(unwrap_model(model)) if inner is None else None) or undo_all()

    def of_packed_view(texts: Any) -> dict[str, Any]:
        collate: Any = DataCollatorWithFlattening
        row = collate()(texts)
        return {**row, "position_ids": row["position_ids"] + first_position(model)}

    reason = f"and {_name(model)} is an encoder-decoder; expected one stack of layers. {_pad_instead(trainer)}"
    routes: list[Callable[[Any], UndoHandle | None]] = [pack_attention, lambda model: undo_all()]
    routes = [] if has_decoder(model) else routes
    for route in routes if inner is None else routes[::-1]:
        attention = route(unwrap_model(model))
        if attention is None:
            continue
        with undisturbed(trainer, model):
            found = _why_not(trainer, inner or of_packed_view, is_labelled=inner is not None or _predicts(trainer))
        if found is None:
            looking = override_method(trainer, "training_step", _look_once(trainer), purpose=APART)
            return undo_all(attention, looking, _routing_new_models(trainer, route))
        attention.remove()
        reason = reason if inner is not None and route is pack_attention else found  # what stock does wrong
    what = "packed(...) joins texts" if inner is None else f"inner={type(inner).__name__} joins the texts of a batch"
    raise ValueError(f"{what} into one row, {reason}")


def _routing_new_models(trainer: Trainer, route: Callable[[Any], UndoHandle | None]) -> UndoHandle:
    """Take the route with each model that ``model_init`` makes, too."""
    made: list[UndoHandle] = []

    def call_model_init(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = before(*args, **kwargs)
        made.append(route(unwrap_model(model)) or undo_all())
        return model

    if cast(Any, trainer).model_init is None:
        return undo_all()
    overriding = override_method(trainer, "call_model_init", call_model_init)
    return UndoHandle(lambda: remove_all([overriding, *made]))


@contextmanager
def undisturbed(trainer: Any, model: nn.Module, *, training: bool = False) -> Iterator[None]:
    """Run in evaluation mode, or in the mode that each module is in; leave modes, random numbers and what the modules
    keep as they were.

    A buffer above ``LARGEST_COPY_BYTES`` is watched but not copied, and a warning names it if it has changed.
    """
    modes = {module: module.training for module in model.modules()}
    kept, drawn = KeptState(), RandomState.capture(trainer.args.device)
    for owner in (trainer, *modes):
        kept.look_at(owner)
    with ExitStack() as stack:
        stack.callback(kept.restore)
        stack.callback(drawn.restore)
        for module, mode in modes.items():
            stack.callback(setattr, module, "training", mode)
            module.training &= training  # not eval(), which a user's module may use to rewrite its weights
            if getattr(module, REPACKS, False):
                stack.callback(set_attribute(module, REPACKS, False).remove)
        yield


def _why_not(trainer: Any, inner: Callable[[Any], Any], *, is_labelled: bool) -> str | None:
    """Return what is wrong with flattened texts, what is expected and what to do, or None."""
    name, start, end = _name(trainer.model), LENGTHS[0], LENGTHS[0] + LENGTHS[1]  # of the second text in the row
    of_first: set[float] = set()
    is_shifted = False
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
        is_leaking = not torch.equal(among, among_others) and (
            # the experts of other tokens may round otherwise, which no gradient shows
            "position_ids" not in row
            or _differs(among, among_others)
            or bool(_reached_texts(trainer, row, training=False))
        )
        with nullcontext() if is_labelled else suppress(Exception):  # of labels of another kind
            of_first = {_loss_of_label(trainer, one, start) for one in (row, reversed_text)}
            is_shifted = len(of_first) == 1 and _loss_of_label(trainer, others, start) not in of_first
    except Exception as error:  # whatever the model raises for inputs that it does not take
        return (
            f"which {name} could not be trained on ({type(error).__name__}: {error}); expected a model with a label "
            f"for each token that takes position_ids. {_pad_instead(trainer)}"
        )
    if is_labelled and labels.ne(IGNORED_LABEL).any():
        return (
            f"with labels {labels.tolist()} for their first tokens; expected {IGNORED_LABEL}, as nothing predicts "
            f"them. Call: DataCollatorWithFlattening(separator_id={IGNORED_LABEL})"
        )
    if is_leaking:
        return _leak(trainer, name)
    if not is_labelled and is_shifted:
        return (
            f"and keeps the label of their first tokens, which the loss of {name} compares with what the text before "
            "predicts; expected none. Pass BucketedCollator(tokenizer, causal_lm=True), with which labels of the data "
            "stay as they are"
        )
    if is_labelled and len(of_first) > 1:
        return (
            f"and leaves out the label of their first tokens, which the loss of {name} counts; expected a causal "
            f"language model. {_pad_instead(trainer)}"
        )
    if _differs(among, alone):
        return (
            f"where {name} does not compute what it computes for a text alone, as with other positions; expected the "
            "same. Call: DataCollatorWithFlattening(position_ids_start=2) if it counts positions from 2; else "
            f"{_pad_instead(trainer)}"
        )
    return None


def _predicts(trainer: Any) -> bool:
    """Return whether the collator of packed rows leaves out the labels of first tokens."""
    return is_causal_lm(trainer.model) or bool(getattr(trainer.data_collator, "causal_lm", False))


def _differs(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() > LARGEST_DEVIATION * expected.norm())


def _leak(trainer: Any, name: str) -> str:
    config = getattr(unwrap_model(trainer.model), "config", None)
    attention = getattr(config, "_attn_implementation", None)
    seen = f"where those of {name} see each other (attention: {attention!r})"
    if getattr(config, "use_cache", False):
        return (
            f"{seen}, as models that return a cache ignore where position_ids start again; expected use_cache=False. "
            "Pass TrainingArguments(..., use_cache=False)"
        )
    if any(isinstance(module, nn.Conv1d) for module in unwrap_model(trainer.model).modules()):
        seen += ", by convolutions or state-space layers along the row"
    return f"{seen}; expected a model whose layers keep apart what position_ids count anew. {_pad_instead(trainer)}"


def _logits(trainer: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the logits of the model's one row around their mean at each token, shape (seq, vocabulary)."""
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad():
        found: torch.Tensor = _outputs(trainer, inputs).logits[0].float()
    if len(found) != inputs["input_ids"].numel():
        raise ValueError(f"it has logits of shape {tuple(found.shape)} for {inputs['input_ids'].numel()} tokens")
    return found - found.mean(dim=-1, keepdim=True)


def _loss_of_label(trainer: Any, row: Mapping[str, Any], position: int) -> float:
    """Return the model's loss where one position alone has a label, always the same."""
    labels = torch.full_like(row["labels"], IGNORED_LABEL)
    labels[0, position] = 0
    config = getattr(unwrap_model(trainer.model), "config", None)
    with (
        torch.no_grad(),
        set_attribute(config, "output_router_logits", False),
    ):  # the loss of a router is over all tokens of a batch
        return float(_outputs(trainer, {**row, "labels": labels}).loss)


def _outputs(trainer: Any, inputs: Mapping[str, Any]) -> Any:
    with trainer.compute_loss_context_manager():
        return trainer.model(**send_to_device(dict(inputs), trainer.args.device))


# ---- The first batch of a run ----------------------------------------------------------------------------------------


def _look_once(trainer: Trainer) -> Callable[..., Any]:
    """Return a ``training_step`` that looks at the first batch of each run, and raises where texts reach each other.

    A batch whose gradients are zero everywhere shows nothing: then the next ones are looked at.
    """
    looked_at: list[Any] = [None]  # the state of the run; a new run has a new one
    zeros: list[int] = [0]

    def training_step(before: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], *args: Any) -> Any:
        if trainer.state is not looked_at[0]:
            reached = _reached_texts(trainer, inputs, training=True)
            zeros[0] = zeros[0] + 1 if reached is None else 0
            if reached is not None or zeros[0] == MOST_LOOKED_AT:
                looked_at[0] = trainer.state
            if zeros[0] == MOST_LOOKED_AT:
                zeros[0] = 0
                notify(
                    logger,
                    f"no gradient reaches the tokens of the first {MOST_LOOKED_AT} batches in {_name(model)}, so that "
                    f"texts of a row are not shown to be apart. {_pad_instead(trainer)}",
                )
            if reached:
                raise ValueError(
                    f"texts {reached[:8]} of a row of the first batch see other texts of it in {_name(model)}: the "
                    "gradients of their tokens reach those; expected exactly 0. " + _pad_instead(trainer)
                )
        return before(model, inputs, *args)

    return training_step


def _reached_texts(trainer: Any, batch: Mapping[str, Any], *, training: bool) -> list[int] | None:
    """Return the texts of the batch's row with the most of them that a gradient reaches from another one.

    None where no gradient reaches any token, so that nothing is shown.

    What comes out of every second text is differentiated by what goes into the others: two backward passes of one row.
    """
    positions = batch.get("position_ids")
    bounds = [] if positions is None else text_bounds(positions, len(batch["input_ids"]))
    row = max(range(len(bounds)), key=lambda number: len(bounds[number]), default=None)
    if row is None or len(bounds[row]) < 3:
        return []
    inputs = {name: value[row : row + 1] if getattr(value, "ndim", 0) > 1 else value for name, value in batch.items()}
    inputs.pop("labels", None)
    reached: set[int] = set()
    is_shown = False
    try:
        with undisturbed(trainer, trainer.model, training=training), torch.enable_grad():
            embedded, hidden = _ends_of_layers(trainer, inputs)
            for parity in (0, 1):
                text = torch.repeat_interleave(torch.diff(torch.tensor(bounds[row]))).to(hidden.device)  # (seq,)
                generator = torch.Generator().manual_seed(0)
                weights = torch.randn(hidden.shape[-1], generator=generator).to(
                    hidden
                )  # a sum is constant after a norm
                score = (hidden[0] * weights)[text % 2 == parity].sum()
                [gradient] = torch.autograd.grad(score, embedded, retain_graph=True)
                is_shown |= bool(gradient.any())
                reached |= set(text[(gradient[0] != 0).any(-1) & (text % 2 != parity)].tolist())
    except RuntimeError as error:
        if "use_reentrant" not in str(error) or not training:  # checkpointing that knows no gradients of inputs
            raise
        return _reached_texts(trainer, batch, training=False)
    return sorted(reached) if is_shown else None


def _ends_of_layers(trainer: Any, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what goes into a model's layers, as a leaf, and what goes into its head; (1, seq, hidden) each."""
    model, embedded = unwrap_model(trainer.model), []

    def begin(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    head = model.get_output_embeddings()  # its logits may be larger than all the rest
    with ExitStack() as stack:
        stack.callback(model.get_input_embeddings().register_forward_hook(begin).remove)
        if head is not None:
            stack.callback(set_attribute(head, "forward", lambda hidden: hidden).remove)
        hidden = _outputs(trainer, inputs).logits
    return embedded[0], hidden


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
    return f"Train on padded rows: bucketed(dataset, batch_size=...) and BucketedCollator(tokenizer{labels})"


def _name(model: Any) -> str:
    return type(unwrap_model(model)).__name__
