"""What ``plan`` plans for: the lengths of the rows, and what of the model the choice of set-ups depends on."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from transformers.utils.import_utils import is_flash_attn_2_available

from hf_memopt.prediction.memory.models import assumed_inputs, default_length, most_tokens, name_on_hub
from hf_memopt.prediction.memory.recording import session
from hf_memopt.prediction.memory.settings import StepSettings, checked_lengths
from hf_memopt.prediction.recipes.planning.set_ups import ModelFacts
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.model import task_of, unwrap_model
from hf_memopt.training.binding.model_changes import is_quantized, new_parts, tied_embeddings
from hf_memopt.training.binding.parameters import layer_stacks
from hf_memopt.training.devices import against_float16, current_os
from hf_memopt.training.techniques import platform_problem
from hf_memopt.training.techniques.tiling.tiles import tile_layers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

MULTIPLE = 8  # tensor cores want it, and collators pad to it
STEPPING = {"falcon_mamba", "jamba", "mamba", "zamba"}
"""Architectures with ``for index in range(seq_len)`` in their scan; seen in transformers 5.8.1 to 5.23.0."""
STEPPING_LENGTH = 64  # default of their rows: the time of a plan grows with it, to minutes at 512

LONG_ROW = 4096  # tokens, from which on tiles are considered: four of the smallest


@dataclass(frozen=True)
class Texts:
    """The lengths to plan for."""

    seq_len: int | None  # tokens of the longest row, where it is cut those that stay; None for a model without text
    # mean padded tokens of a row over an epoch in bucketed order, a multiple of 8; None without lengths
    width: int | None = None
    rows: int | None = None  # the number of examples; None where it is unknown
    tokens: float | None = None  # mean tokens of a row without padding; None without lengths
    cut: int = 0  # rows that are longer than `seq_len`
    lengths: NDArray[np.int64] | None = None  # tokens of each example, shape (examples,); None where they are unknown

    @classmethod
    def of(
        cls, lengths: ArrayLike | None, seq_len: int | None, *, batch_size: int, most: int | None, default: int | None
    ) -> Texts:
        """Return the lengths of rows that are cut to ``seq_len``."""
        if lengths is None:
            return cls(default if seq_len is None else seq_len)
        values = checked_lengths(lengths)
        if default is None:
            raise ValueError(
                f"lengths=<{values.size} lengths> have no meaning for a model without text; expected None. "
                "Leave lengths out"
            )
        longest = int(values.max())
        if seq_len is None:
            if most is not None and longest > most:
                raise ValueError(
                    f"lengths=<longest {longest}> are beyond the {most} positions of the model; expected 1 to {most}. "
                    f"Pass seq_len={most}, which cuts {int((values > most).sum())} of {values.size} rows"
                )
            seq_len = most or _rounded(longest)
        seq_len = min(seq_len, _rounded(longest))
        kept = np.minimum(values, seq_len)
        ordered = np.sort(kept)
        widths = np.maximum.reduceat(ordered, np.arange(0, len(ordered), batch_size))
        rows = np.diff(np.arange(0, len(ordered), batch_size), append=len(ordered))
        width = min(_rounded(float((widths * rows).sum() / len(ordered))), seq_len)
        return cls(seq_len, width, len(kept), float(kept.mean()), int((values > seq_len).sum()), values)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row before it is cut, a multiple of 8; None without lengths."""
        return None if self.lengths is None else _rounded(int(self.lengths.max()))

    def shorter(self) -> tuple[int, float] | None:
        """Return the 99th percentile of the rows, rounded up, and the share of the rows that are longer.

        None where no lengths are known, or where it is hardly shorter than the longest row: by less than a tenth.
        """
        if self.lengths is None or self.seq_len is None:
            return None
        length = _rounded(float(np.percentile(self.lengths, 99, method="inverted_cdf")))
        longer = float((self.lengths > length).mean())
        return (length, longer) if length < 0.9 * self.seq_len else None

    def shortened(self, seq_len: int, batch_size: int) -> Texts:
        """Return the lengths of the same rows, cut to fewer tokens."""
        if self.lengths is None:
            return Texts(seq_len)
        return Texts.of(self.lengths, seq_len, batch_size=batch_size, most=None, default=seq_len)


def _rounded(tokens: float) -> int:
    return int(-(-tokens // MULTIPLE)) * MULTIPLE


def facts_of(
    model: Any, task: str | None, system: str | None = None, settings: StepSettings | None = None
) -> tuple[Any, str | None, ModelFacts]:
    """Return what to estimate, its task and facts.

    Of a plain module of transformers its configuration is estimated, which can be loaded in other ways. ``system`` is
    where it trains, a word of ``SYSTEMS``; None for this machine. The memory that CUDA manages, where paged optimizers
    keep their state, cannot exceed the GPU on Windows and WSL: CUDA Programming Guide, "Unified Memory on Windows, WSL,
    and Tegra"; https://github.com/bitsandbytes-foundation/bitsandbytes/issues/453.
    """
    source, own_task = model, task
    is_module = isinstance(model, nn.Module)
    if is_module and not hasattr(model, "peft_config") and not is_quantized(model) and task_of(model) is not None:
        source, own_task = model.config, task_of(model)
    loaded = session().load(source, task=own_task)
    built = loaded.model
    found = task_of(built)
    stacks = [len(stack) for stack in layer_stacks(built).values()]
    config = getattr(built, "config", None)
    kind = str(getattr(config, "model_type", ""))
    facts = ModelFacts(
        task=found,
        is_tied=bool(tied_embeddings(built)),
        layers=min(stacks, default=0),
        has_adapters=hasattr(built, "peft_config"),
        is_quantized=is_quantized(built),
        can_adapt=found is not None,
        can_reload=not isinstance(source, nn.Module),
        supports_flash=getattr(built, "_supports_flash_attn", False),  # seen in transformers 5.8.1, 5.17.0 and 5.23.0
        has_flash=is_flash_attn_2_available(),
        has_offload=versions.can_offload_checkpoints(),
        has_segments=not platform_problem(system),
        has_paging=(system or current_os()) == "linux",
        overflow=against_float16(config=config),
        most_tokens=most_tokens(built) if found is not None else None,
        default_length=STEPPING_LENGTH if kind in STEPPING else default_length(built, settings),
        compares_rows="return_loss" in inspect.signature(unwrap_model(built).forward).parameters,
        has_experts=any(hasattr(module, "has_gate") for module in built.modules()),
        kind=kind,
        new_parts=new_parts(built),
        notes=loaded.notes,
    )
    return source, own_task, facts


def assumptions(source: Any, task: str | None, settings: StepSettings) -> tuple[str, ...]:
    """Return what is assumed of head, pictures and audio, and what was given without effect, as ``estimate`` does."""
    return tuple(assumed_inputs(session().load(source, task=task).model, settings))


def can_tile(source: Any, task: str | None) -> bool:
    """Return whether ``tile_layers`` takes a model."""
    try:
        tile_layers(session().load(source, task=task).model).remove()
    except ValueError:
        return False
    return True


def name_to_load(model: Any) -> str | None:
    """Return what ``from_pretrained`` takes for a model; None for one that was not loaded from anywhere."""
    if isinstance(model, str | os.PathLike):
        return name_on_hub(os.fspath(model))
    return getattr(getattr(model, "config", model), "name_or_path", None) or None
