"""Which floating-point format the current machine trains in.

bfloat16 where it is native (never where it is emulated: Turing, Volta, Pascal), else float16 with float32 master
weights and a gradient scaler where tensor cores make it fast, else float32. On a CPU float32, unless its instruction
set multiplies bfloat16. ``float16_overflow.csv`` has what is known to leave float16's range, with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hf_memopt.training.devices.gpu_table import against_float16


@dataclass(frozen=True, slots=True)
class Precision:
    """A floating-point format of the autocast region and why it was chosen; weights stay float32."""

    name: Literal["bf16", "fp16", "fp32"]
    reason: str
    emulates_bf16: bool = False

    @property
    def bf16(self) -> bool:
        """The value of ``TrainingArguments(bf16=...)``."""
        return self.name == "bf16"

    @property
    def fp16(self) -> bool:
        """The value of ``TrainingArguments(fp16=...)``."""
        return self.name == "fp16"


def choose_precision(*, use_cpu: bool = False) -> Precision:
    """Return the precision that suits the current accelerator, or the CPU if there is none or ``use_cpu`` is set.

    The first visible device decides; the devices of one machine are assumed to be alike.
    """
    backend = "cpu" if use_cpu else accelerator_type()
    if backend == "cuda":
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        gpu = "{} (compute capability {}.{})".format(name, *capability)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", f"{gpu} computes bfloat16 natively")
        problem = against_float16(name) or ("it has no tensor cores for float16" if capability < (7, 0) else "")
        reason = f"{gpu} only emulates bfloat16{problem and f', and {problem}'}"
        return Precision("fp32" if problem else "fp16", reason, emulates_bf16=True)
    if backend == "xpu":
        return Precision("bf16", f"{torch.xpu.get_device_name()} computes bfloat16 natively")
    if backend == "mps":
        return Precision("fp32", "mixed precision on MPS is not yet measured by this project")
    if backend == "cpu":
        return _choose_on_cpu()
    return Precision("fp32", f"no rule for the accelerator {backend!r} yet")


def _choose_on_cpu() -> Precision:
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # public since torch 2.11
    for instruction_set in ("amx_bf16", "avx512_bf16"):
        if capabilities.get(instruction_set):
            return Precision("bf16", f"this CPU multiplies bfloat16 ({instruction_set}); the gain is not yet measured")
    return Precision("fp32", "this CPU has no bfloat16 instructions, so 16 bit would only be slower")


def accelerator_type() -> str:
    """Return torch's name of the current accelerator: ``cuda`` (ROCm too), ``xpu``, ``mps``, ... or ``cpu``."""
    if not torch.accelerator.is_available():
        return "cpu"
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type


def check_precision(*, bf16: bool, fp16: bool, use_cpu: bool = False) -> None:
    """Refuse a precision that the current machine cannot train in."""
    backend = "cpu" if use_cpu else accelerator_type()
    native = choose_precision(use_cpu=use_cpu)
    if fp16 and backend in ("cpu", "mps"):
        raise ValueError(
            f"fp16=True cannot train on this machine, whose device is {backend!r}; expected a GPU with a gradient "
            f"scaler. Leave fp16 out: this machine trains in {native.name}"
        )
    if bf16 and native.emulates_bf16:
        raise ValueError(f"bf16=True is emulated here: {native.reason}; expected {native.name}. Leave bf16 out")
