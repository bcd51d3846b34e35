"""One call of a module, to be run on some of its rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten  # private, as transformers uses it (2.6 to 2.13)
from transformers import Cache

from hf_memopt.training.binding.losses import is_listed_module

_WITHOUT_TOKENS = ("pixel_values", "input_values", "input_features")
ROWS_FIRST = "input_ids", "inputs_embeds", *_WITHOUT_TOKENS, "decoder_input_ids", "hidden_states", "attention_mask"
"""The number of rows is the first dimension of the first of these that a call has, else of its first tensor."""

MOST_LAYOUTS = 8  # tried, where several dimensions have as many entries as there are rows
PLAIN = (int, float, bool, str, bytes, torch.dtype, torch.device, torch.Size, type(None))

DRAWS = "it draws random numbers other than dropout's, so that parts draw others than the whole"
MOST_ENTRIES, MOST_VALUES = 4096, 2  # of a tensor that may say what is done with a batch, as a flag or a task does
CODES = frozenset(range(-1, 16))


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two outputs that are no tensors are equal; nan equals nan."""
    return type(one) is type(other) and (not isinstance(one, PLAIN) or repr(one) == repr(other))


def code_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the values of an integer or boolean tensor of one or two of them, which may say what is done with a batch.

    None for any other. Numbers of steps and times are left out, or each batch would be new.
    """
    if tensor.is_floating_point() or tensor.is_complex() or not 0 < tensor.numel() <= MOST_ENTRIES:
        return None
    values = tuple(torch.unique(tensor).tolist())
    return values if len(values) <= MOST_VALUES and values[0] in CODES and values[-1] in CODES else None


def settings_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the modes of all modules inside and the plain attributes of a user's own, of large numbers the signs."""
    parts = list(module.modules())
    own = [vars(part) for part in parts if not is_listed_module(type(part).__module__)]
    return tuple([part.training for part in parts]), tuple(
        [
            (name, (value > 0) - (value < 0) if isinstance(value, (int, float)) and value not in CODES else value)
            for attributes in own
            for name, value in attributes.items()
            if isinstance(value, PLAIN)
        ]
    )


class DependentRowsError(ValueError):
    """Rows cannot run apart, for this reason."""


class ChangesItselfError(DependentRowsError):
    """A forward pass leaves something in the module, or in its inputs."""


class Layout(NamedTuple):
    """The dimension of the rows in each input and output, flattened; None for what all rows share."""

    into: tuple[int | None, ...]
    out: tuple[int | None, ...]


class ModuleCall:
    """A call of a module, to be run on some of its rows."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.module, self._forward, self.has_graph = module, forward, torch.is_grad_enabled()
        self.leaves: list[Any]
        self.leaves, self._spec = tree_flatten((args, kwargs))
        given = [kwargs, *(value for value in args if isinstance(value, Mapping))]
        named = (mapping.get(name) for name in ROWS_FIRST for mapping in given)
        main = next((x for x in (*named, *self.leaves) if torch.is_tensor(x) and x.dim() > 0), None)
        self._main = next((index for index, leaf in enumerate(self.leaves) if leaf is main and main is not None), None)
        self.rows: int = 0 if main is None else main.shape[0]  # 0 if no tensor shows it
        self.columns: int | None = None  # tokens of each row; None for images and sounds
        if main is not None and main.dim() > 1 and not any(kwargs.get(name) is main for name in _WITHOUT_TOKENS):
            self.columns = int(main.shape[1])

    def kind(self) -> Any:
        """Return what calls have in common whose rows lie alike: not the sizes, but which of them agree by chance; and
        what may say what is done with them.
        """
        return self._spec, self.has_graph, tuple(map(self._kind_of, self.leaves)), settings_of(self.module)

    def _kind_of(self, leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf)
        is_column = leaf.shape == (self.rows,) and not leaf.is_floating_point()
        has_repeats = is_column and len(torch.unique(leaf)) < self.rows  # rows of one group, perhaps
        is_text = leaf.dim() > 1 and self.columns in leaf.shape[1:]
        return leaf.dtype, leaf.dim(), self._candidates_of(leaf), has_repeats, None if is_text else code_of(leaf)

    def _candidates_of(self, leaf: torch.Tensor) -> tuple[int, ...]:
        return tuple(d for d, size in enumerate(leaf.shape) if size == self.rows)

    def candidates(self) -> Iterator[tuple[int | None, ...]]:
        """Yield the dimensions of the rows in each input, by shape; the input that the number comes from is cut."""
        choices: list[tuple[int | None, ...]] = []
        for index, leaf in enumerate(self.leaves):
            found: tuple[int | None, ...] = self._candidates_of(leaf) if torch.is_tensor(leaf) else ()
            choices.append(found[:1] if index == self._main else (*found, None))
        return islice(product(*choices), MOST_LAYOUTS)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the module; return its outputs, flattened."""
        return self.run_with_spec(leaves)[0]

    def run_with_spec(self, leaves: Sequence[Any]) -> tuple[list[Any], TreeSpec]:
        """The same with what puts them together again."""
        args, kwargs = tree_unflatten(list(leaves), self._spec)
        with warnings.catch_warnings():
            if not torch.is_grad_enabled():  # no graph is wanted, whatever reentrant checkpointing thinks of that
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            leaves, spec = tree_flatten(self._forward(*args, **kwargs))
        if self.has_graph:  # a cache of generation, which training does not read: None, so that reading it would fail
            leaves = [None if isinstance(leaf, Cache) else leaf for leaf in leaves]
        return leaves, spec

    def rows_from(self, into: Sequence[int | None], start: int, stop: int) -> list[Any]:
        """Return the inputs of some rows; views."""
        return [
            leaf if dim is None else leaf.narrow(dim, start, stop - start)
            for leaf, dim in zip(self.leaves, into, strict=True)
        ]

    def try_rows(self, into: Sequence[int | None], start: int, stop: int) -> list[Any]:
        """Run the module with copies of the inputs of some rows; return its outputs, flattened."""
        given = self.rows_from(into, start, stop)
        copies = [leaf.clone() if torch.is_tensor(leaf) else leaf for leaf in given]
        found = self.run(copies)
        for leaf, other in zip(given, copies, strict=True):
            if torch.is_tensor(leaf) and other._version and not torch.equal(leaf, other):
                raise ChangesItselfError(
                    f"it changes an input of shape {tuple(leaf.shape)} in place, which parts would change twice"
                )
        return found

    def reason_against(self) -> str | None:
        """Return why its inputs cannot be cut, or run twice; None if nothing is against it."""
        other = next((leaf for leaf in self.leaves if not (torch.is_tensor(leaf) or isinstance(leaf, PLAIN))), None)
        if other is not None:  # a cache of generation, for example
            return f"its input <{type(other).__name__}> may be changed by each pass"
        args, kwargs = tree_unflatten(self.leaves, self._spec)
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, list) and len(value) == self.rows:
                return f"its input {name} is a list with an entry for each row, and only tensors are cut"
        return None

    def devices(self) -> list[torch.device]:
        """Return the devices of inputs and weights; the host's generators are read in any case."""
        tensors = [leaf for leaf in self.leaves if torch.is_tensor(leaf)]
        found = {tensor.device for tensor in (*tensors, *self.module.parameters())}
        return sorted(found - {torch.device("cpu"), torch.device("meta")}, key=str) or [torch.device("cpu")]
