"""How the GPUs of a plan share a step: which strategies are considered, which set-ups work under each, and why one won.

With ``"auto"`` each GPU holds the whole model (DDP) where that fits and is as fast. FSDP2 is considered where nothing
fits under DDP, or only with activations that are recomputed or less optimizer state; offload to the host where no
method fits without it, since the host's memory is unknown. ZeRO is considered only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.compatibility import refused_fields
from hf_memopt.plain_data import check_word
from hf_memopt.recipes import NAMES, STRATEGIES
from hf_memopt.units import format_bytes, percent

if TYPE_CHECKING:
    from hf_memopt.devices import Gpu
    from hf_memopt.recipes.planning.set_ups import SetUp
    from hf_memopt.recipes.planning.simulated import Candidate

TITLES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
PLAIN_OPTIMIZER = "adamw_torch_fused"


@dataclass(frozen=True)
class Sharing:
    """A strategy of ``Recipe.distributed`` for one plan."""

    strategy: str  # never `"auto"`
    # whether sharded states wait in host memory, with `"fsdp2"` and `"zero3"` the weights too
    offload_params: bool = False

    @property
    def title(self) -> str:
        return TITLES[self.strategy] + (" with offload" if self.offload_params else "")

    @property
    def order(self) -> int:
        """Smaller is simpler: whole models, then sharded ones, then those on the host."""
        return 2 if self.offload_params else int(self.strategy != "ddp")

    def adapted(self, set_up: SetUp) -> SetUp | None:
        """Return a set-up as it works under the strategy; None where it does not.

        Sharded weights are trained with torch's AdamW, since bitsandbytes' optimizers do not know them, in 16 bits
        where the GPU has them.
        """
        recipe, engine = set_up.recipe, NAMES[self.strategy]
        refused = refused_fields(recipe, engine)
        if any(technique.kind != "exact" for technique, _ in refused.values()):
            return None
        if self.strategy == "ddp":
            return replace(set_up, sharing=self)
        is_plain = recipe.optim == PLAIN_OPTIMIZER and not recipe.offload
        if not is_plain or recipe.precision in ("fp32", "tf32"):
            return None
        if recipe.load_in is not None and (self.strategy, recipe.load_in) != ("fsdp2", "nf4"):
            return None
        if recipe.quantize_experts:  # in buffers, which no strategy cuts
            return None
        fields: dict[str, Any] = {}
        reasons = dict(recipe.reasons)
        for name, (technique, refusal) in refused.items():
            fields[name], reasons[name] = technique.fields[name], f"{self.title}: {refusal.reason}"
        return replace(set_up, recipe=recipe.replace(**fields, reasons=reasons), sharing=self)


def check_strategy(strategy: str, world_size: int, goal: str = "speed") -> None:
    """Refuse a strategy that is unknown, or that there are too few GPUs for."""
    check_word("strategy", strategy, STRATEGIES)
    if world_size == 1 and strategy != "auto":
        raise ValueError(
            f"strategy={strategy!r}, world_size=1 do not fit each other: one GPU shares nothing; expected several. "
            "Pass world_size=2, or leave strategy out"
        )
    if goal == "longest" and strategy not in ("auto", "ddp"):
        raise ValueError(
            f"strategy={strategy!r}, goal='longest' are incompatible: the longest rows are searched for with whole "
            "models alone; expected another goal. Pass goal='memory', or strategy='ddp'"
        )


def sharings_of(strategy: str, world_size: int, goal: str) -> tuple[Sharing | None, ...]:
    """Return the ways to share a step that are considered, in order; None alone for one GPU."""
    if world_size == 1:
        return (None,)
    if strategy == "ddp" or goal == "longest":
        return (Sharing("ddp"),)
    if strategy != "auto":
        return Sharing(strategy), Sharing(strategy, offload_params=True)
    return Sharing("ddp"), Sharing("fsdp2"), Sharing("fsdp2", offload_params=True)


def sharing_text(chosen: Candidate, candidates: Sequence[Candidate], gpu: Gpu, world_size: int) -> str:
    """Return the sentence that says why the GPUs share a step as they do; "" for one GPU."""
    own = chosen.sharing
    if own is None:
        return ""
    waits = ""
    if chosen.communication_fraction is not None:
        waits = f"; {percent(chosen.communication_fraction)} of a step waits for it"
    host = ""
    if own.offload_params:
        host = f"; the host holds {format_bytes(world_size * chosen.host_bytes)} for all of them"
    speed = f"{gpu.link_bytes_per_second / 1e9:.0f} GB/s assumed"
    return (
        f"{world_size} GPUs share a step by {own.title}: {_why(chosen, candidates)}. Between them: {gpu.link}, "
        f"{speed}{waits}{host}. GiB are those of each GPU, the speed is that of all"
    )


def _why(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    from hf_memopt.memory.step_time import equally_fast  # imports torch, and options are checked without it

    own = chosen.sharing
    others = [one for one in candidates if one.stage == chosen.stage and one.sharing != own]
    simpler = [one for one in others if one.sharing is not None and own is not None and one.sharing.order < own.order]
    if simpler and not any(one.fits for one in simpler):
        titles = dict.fromkeys(one.sharing.title for one in simpler if one.sharing is not None)
        return f"nothing fits under {' or '.join(titles)}"
    fitting = [one for one in others if one.fits]
    if fitting:
        rival = min(fitting, key=lambda one: one.cost)
        assert rival.sharing is not None
        if equally_fast(rival.cost, chosen.cost):
            more = [one.name for one in rival.techniques if one not in chosen.techniques]
            without = f", and without {' and '.join(more)}" if more else ", and simpler"
            return f"as fast as the best under {rival.sharing.title}{without}"
        time = "time" if chosen.seconds is not None else "assumed time"
        return f"the best under {rival.sharing.title} takes {rival.cost / chosen.cost:.2f} x its {time}"
    if own is not None and own.strategy == "ddp":
        return "each GPU holds the whole model, and only gradients are exchanged"
    return "as asked for"
