"""The precision that follows the card, with the card played by monkeypatches of torch's own answers."""

from __future__ import annotations

import pytest
import torch

from hf_memopt.techniques import precision
from hf_memopt.techniques.precision import check_precision, choose_precision


def play(monkeypatch, kind: str, *, name: str = "", capability: tuple[int, int] = (0, 0), native_bf16: bool = False):
    monkeypatch.setattr(precision, "accelerator_type", lambda: kind)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: native_bf16 or including_emulation
    )


@pytest.mark.parametrize(
    ("name", "capability", "native", "chosen", "reason"),
    [
        ("Tesla T4", (7, 5), False, "fp16", "Tesla T4 (compute capability 7.5) only emulates bfloat16"),
        ("Tesla V100", (7, 0), False, "fp16", "Tesla V100 (compute capability 7.0) only emulates bfloat16"),
        ("RTX 3050", (8, 6), True, "bf16", "RTX 3050 (compute capability 8.6) computes bfloat16 natively"),
    ],
)
def test_cuda_cards(monkeypatch, name, capability, native, chosen, reason) -> None:
    play(monkeypatch, "cuda", name=name, capability=capability, native_bf16=native)
    found = choose_precision()
    assert (found.name, found.reason, found.bf16, found.fp16) == (chosen, reason, chosen == "bf16", chosen == "fp16")


def test_use_cpu_wins_over_the_card(monkeypatch) -> None:
    play(monkeypatch, "cuda", name="RTX 3050", capability=(8, 6), native_bf16=True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert choose_precision(use_cpu=True).name == "fp32"


@pytest.mark.parametrize(
    ("capabilities", "chosen", "reason"),
    [
        ({}, "fp32", "this CPU has no bfloat16 instructions, so 16 bit would only be slower"),
        ({"amx_bf16": True}, "bf16", "this CPU multiplies bfloat16 (amx_bf16); the gain is not yet measured"),
        ({"avx512_bf16": True}, "bf16", "this CPU multiplies bfloat16 (avx512_bf16); the gain is not yet measured"),
    ],
)
def test_cpu_by_its_instructions(monkeypatch, capabilities, chosen, reason) -> None:
    play(monkeypatch, "cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert (choose_precision().name, choose_precision().reason) == (chosen, reason)


def test_a_torch_that_does_not_tell_its_capabilities_means_float32(monkeypatch) -> None:
    play(monkeypatch, "cpu")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert choose_precision().name == "fp32"


@pytest.mark.parametrize(("kind", "chosen"), [("mps", "fp32"), ("npu", "fp32")])
def test_other_accelerators(monkeypatch, kind, chosen) -> None:
    play(monkeypatch, kind)
    assert choose_precision().name == chosen


def test_fp16_without_a_card_is_refused(monkeypatch) -> None:
    play(monkeypatch, "cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    with pytest.raises(ValueError) as error:
        check_precision(bf16=False, fp16=True)
    assert str(error.value) == (
        "fp16=True cannot train on this machine, whose device is 'cpu'; expected a card with a gradient scaler. "
        "Leave fp16 out: this machine trains in fp32"
    )


def test_emulated_bf16_is_refused(monkeypatch) -> None:
    play(monkeypatch, "cuda", name="Tesla T4", capability=(7, 5))
    with pytest.raises(ValueError) as error:
        check_precision(bf16=True, fp16=False)
    assert str(error.value) == (
        "bf16=True is emulated here: Tesla T4 (compute capability 7.5) only emulates bfloat16; expected fp16 on this "
        "card. Pass fp16=True"
    )


def test_both_at_once_are_refused() -> None:
    with pytest.raises(ValueError) as error:
        check_precision(bf16=True, fp16=True)
    assert str(error.value) == (
        "bf16=True, fp16=True are given together; expected one of them. Drop one: preset(..., bf16=True)"
    )


def test_what_the_card_can_do_is_accepted(monkeypatch) -> None:
    play(monkeypatch, "cuda", name="Tesla T4", capability=(7, 5))
    assert check_precision(bf16=False, fp16=True) is None
    play(monkeypatch, "cuda", name="RTX 3050", capability=(8, 6), native_bf16=True)
    assert check_precision(bf16=True, fp16=False) is None
    assert check_precision(bf16=False, fp16=True) is None


def test_the_machine_at_hand_gets_an_answer() -> None:
    assert choose_precision().name in ("bf16", "fp16", "fp32")
