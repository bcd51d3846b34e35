"""The kernels' hidden buffers, worked out by hand from the CUDA source; what cuBLAS keeps; the autocast lists."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import A100, H100, RTX_3090, T4, header
from host_semantics import CPU_LISTS
from huggingface_hub.errors import StrictDataclassError
from recorded import uncounted
from transformers import AutoConfig

from hf_memopt.prediction.memory.cuda import kernel_buffers as kernels
from hf_memopt.prediction.memory.cuda import workspace_bytes
from hf_memopt.prediction.memory.cuda.autocast import OPERATORS, Policy
from hf_memopt.training.binding.model import HEADS
from tests.memory.small_configs import CONFIGS

aten = torch.ops.aten


def test_each_operator_without_buffers_exists_and_has_its_source() -> None:
    """Torch may drop or rename one; a rule takes precedence over the table."""
    table = Path(kernels.__file__).with_name("no_buffers.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines()))
    some_overloads = {"addmm", "max", "min"}
    ruled = {func._schema.name.partition("::")[2] for func in kernels._RULES} - some_overloads
    for row in rows:
        name = row["operator"]
        assert getattr(aten, name, None) or getattr(aten, f"{name}_", None), name
        assert name not in ruled
        assert row["allocates"]
        assert re.fullmatch(r"aten/src/ATen/native/[\w/]+\.(h|cpp|cu|cuh)(:\d+|, \w+ \(2\.\d+\))", row["source"]), name
    assert [row["operator"] for row in rows] == sorted({row["operator"] for row in rows})


def all_types() -> dict[str, str]:
    """Return a task of each type of model."""
    return {
        kind: task
        for task in ("image-classification", "seq2seq", "masked-lm", "causal-lm")
        for kind in HEADS[task].types
    }


def two_layers(kind: str) -> Any:
    """Return the default configuration of a type with few layers, where it can be set."""
    config = AutoConfig.for_model(kind)
    of_sides = ("encoder_layers", "decoder_layers", "num_decoder_layers")
    for name in ("num_hidden_layers", "num_layers", "n_layer", *of_sides):
        if isinstance(getattr(config, name, None), int):
            with suppress(AttributeError, NotImplementedError):
                setattr(config, name, 2)
    if getattr(config, "layer_types", None):
        with suppress(AttributeError):
            config.layer_types = config.layer_types[:2]
    return config


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(all_types()))
def test_what_every_kernel_of_an_architecture_allocates_is_known(kind: str) -> None:
    task = all_types()[kind]
    try:
        found = uncounted(two_layers(kind), task=task, **({} if task == "image-classification" else {"seq_len": 64}))
    except (ImportError, ValueError, StrictDataclassError) as error:
        pytest.skip(str(error))
    assert found == []


def test_an_operator_of_which_nothing_is_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_NO_BUFFERS", kernels._NO_BUFFERS - {"embedding", "cat"})
    assert uncounted(CONFIGS["llama"](), seq_len=23) == [
        "what the kernels of cat, embedding allocate beside their outputs is not counted"
    ]


@pytest.mark.parametrize(
    ("capability", "release", "blocks"),
    [
        (A100, (2, 13), (8519680, 8519680)),
        (T4, (2, 6), (8519680, 8519680)),
        (H100, (2, 6), (33554432, 33554432)),
        (H100, (2, 13), (33554432, 33554432)),
        (RTX_3090, (2, 10), (8519680, 8519680, 1048576)),
        ((12, 0), (2, 11), (8519680, 8519680)),
        ((12, 0), (2, 12), (33554432, 33554432)),
        ((10, 0), (2, 12), (33554432, 33554432)),
        ((11, 0), (2, 13), (8519680, 8519680)),
        ((11, 0), (2, 14), (33554432, 33554432)),
    ],
)
def test_workspace(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], release: tuple[int, int], blocks: tuple[int, ...]
) -> None:
    monkeypatch.setattr(kernels, "TORCH_RELEASE", release)
    assert workspace_bytes(capability) == blocks


def registered(key: str) -> set[str]:
    """Return the operators with a kernel for a dispatch key; a private function, seen in 2.6 to 2.15."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


CUDA_LISTS = (tuple(OPERATORS), ("binary_cross_entropy",))  # which raises


@pytest.mark.parametrize(("key", "lists"), [("AutocastCUDA", CUDA_LISTS), ("AutocastCPU", tuple(CPU_LISTS.values()))])
def test_autocast_lists_hold_each_registered_operator_once(key: str, lists: Sequence[Sequence[str]]) -> None:
    names = [name for names in lists for name in names]
    assert len(names) == len(set(names))
    # of builds for CUDA: recurrent layers are not estimated; torch 2.15 has two old names fewer and a new one
    assert set(names) - {"qr", "cholesky"} == registered(key) - {"_cudnn_rnn", "linalg_matrix_sqrth", "qr", "cholesky"}


@pytest.mark.parametrize("policy", [policy for policy in Policy if policy != Policy.FLOAT32_APPEND_DTYPE])
def test_autocast_policies_are_those_of_torchs_header(policy: Policy) -> None:
    lines = header("ATen", "autocast_mode.h")
    (lines,) = re.findall(rf"#define AT_FORALL_{policy.upper()}\(_\)((?:.*\\\n)*.*)", lines)
    listed = re.findall(r"_\((\w+)(?:, (\w+))?\)", lines)
    names = [name for name, own in OPERATORS.items() if own is policy and not name.startswith("cudnn")]
    # cuDNN's own convolutions are added for CUDA only
    assert sorted(".".join(filter(None, pair)) for pair in listed) == sorted(names)
