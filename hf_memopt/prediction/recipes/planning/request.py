"""What ``plan`` is asked for, checked: the words of ``goal``, ``method`` and ``allow``, the GPU, the batch.

Nothing heavy is imported, since the command line checks its options before anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from hf_memopt.plain_data import check_word, items_of, shown
from hf_memopt.technique_list import TECHNIQUES
from hf_memopt.training.devices import Gpu, current_gpu, current_os, custom_gpu, find_gpu
from hf_memopt.units import format_bytes

GOALS: Mapping[str, str] = {
    "speed": "the least time per example",
    "memory": "the least memory; of set-ups within 5 % of it the fastest",
    "longest": "the longest rows; at that length the least time per example",
}
METHODS: Mapping[str, str] = {
    "auto": "full training where it fits with ease, else LoRA, else QLoRA",
    "full": "every weight is trained",
    "lora": "adapters are trained, on 16-bit weights",
    "qlora": "adapters are trained, on 4-bit weights",
}
ALLOW: dict[str, str] = {
    "release_clipping": "give up clipping by the global norm, so that each gradient is freed as soon as it is used",
    "bf16_weights": "train bfloat16 weights with stochastic rounding, without float32 copies",
    "freeze": "leave embeddings, or also the lower half of the layers, as they are",
    "shorter": "cut texts to a half or a quarter of the length where nothing else fits",
}
SYSTEMS: Mapping[str, str] = {"linux": "Linux", "windows": "Windows", "wsl": "WSL"}
DESKTOP_BYTES = 2**29  # of the 0.3 to 1 GiB of a GPU that a desktop takes
OF_ALL_WEIGHTS = ("release_clipping", "bf16_weights", "freeze")
"""What of ``ALLOW`` means nothing where only adapters are trained."""


EffectiveBatch = Annotated[int, range(1, 10**5 + 1)]
"""The search tries the divisors of it one by one."""


def checked_allow(allow: str | Iterable[str], method: str, gpu: Gpu) -> tuple[str, ...]:
    """Return the words of ``allow`` in the order of ``ALLOW``, then those of other techniques that ask for one."""
    items = items_of(allow)
    words = (allow,) if items is None else items
    known = ALLOW | {one.consent: one.why for one in TECHNIQUES.values() if one.consent not in ("", *ALLOW)}
    for word in words:
        check_word("allow", word, known)
    for word in OF_ALL_WEIGHTS:
        if word in words and method in ("lora", "qlora"):
            raise ValueError(
                f"allow={word!r}, method={method!r} contradict each other: it is for weights that are trained, and "
                f"only adapters are; expected another method. Pass method='full', or leave {word!r} out"
            )
    if "bf16_weights" in words and not gpu.bf16:
        raise ValueError(
            f"allow='bf16_weights', gpu={gpu.name!r} contradict each other: this GPU only emulates bfloat16; expected "
            "compute capability 8.0 or newer. Leave 'bf16_weights' out"
        )
    return tuple(word for word in known if word in words)


def refuse_removed(given: Mapping[str, Any]) -> None:
    """Raise for the first argument that ``plan`` does not have; those of several GPUs name what counts them."""
    for name, value in given.items():
        if name in ("world_size", "strategy"):
            raise TypeError(
                f"{name}={shown(value)} is no argument of plan, which is for one GPU; expected one of its own. "
                "Call: hf-memopt rehearse --gpus 2 --gpu T4 train.py"
            )
        raise TypeError(f"plan() got an unexpected keyword argument {name!r}")


def planned_os(os: str | None, gpu: str | Gpu | None) -> str:
    """Return the system to plan for: this machine's; of a laptop by name Windows, where the fewest levers work."""
    if os is None and gpu is not None and "Laptop" in find_gpu(gpu).name:
        return "windows"
    return os or current_os()


def read_gpu(gpu: str | Gpu | None, budget: int | str | None, os: str | None = None) -> Gpu:
    """Return the GPU to plan for; of a budget beside it only so much is usable, else what a desktop leaves."""
    check_word("os", os or "linux", SYSTEMS)
    if gpu is None and budget is not None:
        here = current_gpu()
        found = _of_size(budget) if here is None else here
    else:
        known = current_gpu() if gpu is None else find_gpu(gpu)
        if known is None:
            raise ValueError(
                "gpu=None means the GPU of this machine, and it has none with CUDA; expected a name or a size. Pass "
                "gpu='RTX 3060 12GB'"
            )
        found = known
    system = planned_os(os, gpu)
    if system != "linux":
        works = f"planned for {SYSTEMS[system]}, where neither expandable segments nor paged state work"
        found = replace(found, notes=(*found.notes, works if os else f"{works}; os='linux' plans with them"))
    if budget is None:
        return found if system == "linux" and "Laptop" not in found.name else _beside_desktop(found)
    budget_bytes = _of_size(budget).usable_bytes
    if budget_bytes > found.usable_bytes:
        raise ValueError(
            f"budget={budget!r} is more than the {format_bytes(found.usable_bytes)} that {found.name} has; expected "
            f"less, or no budget. Pass budget='{found.usable_bytes // 2**20}MiB'"
        )
    return replace(found, usable_bytes=budget_bytes)


def _beside_desktop(gpu: Gpu) -> Gpu:
    """Return a GPU without what a desktop may take of it."""
    kept, whole = min(DESKTOP_BYTES, gpu.usable_bytes // 4), f"budget='{gpu.usable_bytes // 2**20}MiB'"
    note = f"{format_bytes(kept)} of {gpu.name} are left to the desktop; {whole} plans with all of it"
    return replace(gpu, usable_bytes=gpu.usable_bytes - kept, notes=(*gpu.notes, note))


def _of_size(budget: int | str) -> Gpu:
    try:
        return custom_gpu(budget)
    except ValueError as error:
        raise ValueError(str(error).replace("memory=", "budget=")) from None
