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
from blocks import A100, BF16, H100, RTX_3090, T4, empty, header, hidden_bytes
from host_semantics import CPU_LISTS
from huggingface_hub.errors import StrictDataclassError
from recorded import uncounted
from transformers import AutoConfig

from hf_memopt.binding.model import HEADS
from hf_memopt.memory.cuda import kernel_buffers as kernels
from hf_memopt.memory.cuda import workspace_bytes
from hf_memopt.memory.cuda.attention import TORCH_RELEASE
from hf_memopt.memory.cuda.autocast import OPERATORS, Policy
from tests.memory.small_configs import CONFIGS

aten = torch.ops.aten
INDEX, BOOL = torch.int64, torch.bool


ARGUMENTS = """
_scaled_dot_product_flash_attention: query key value dropout_p is_causal return_debug_mask scale
_scaled_dot_product_flash_attention_backward: grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k
    dropout_p is_causal philox_seed philox_offset scale
_scaled_dot_product_efficient_attention: query key value attn_bias compute_log_sumexp dropout_p is_causal scale
_scaled_dot_product_efficient_attention_backward: grad_out_ query key value attn_bias out logsumexp philox_seed
    philox_offset dropout_p grad_input_mask is_causal scale
native_layer_norm_backward: grad_out input normalized_shape mean rstd weight bias output_mask
_fused_rms_norm_backward: grad_out input normalized_shape rstd weight output_mask
convolution_backward: grad_output input weight bias_sizes stride padding dilation transposed output_padding groups
    output_mask
embedding_dense_backward: grad_output indices num_weights padding_idx scale_grad_by_freq
index_put: self indices values accumulate
index_put_: self indices values accumulate
_index_put_impl_: self indices values accumulate unsafe
_unsafe_index_put: self indices values accumulate
_softmax_backward_data: grad_output output dim input_dtype
_safe_softmax: self dim dtype
logsumexp: self dim keepdim
masked_scatter: self mask source
masked_scatter_: self mask source
masked_select: self mask
scatter_reduce.two: self dim index src reduce include_self
masked_scatter_backward: grad_output mask sizes
_ctc_loss_backward: grad log_probs targets input_lengths target_lengths neg_log_likelihood log_alpha blank zero_infinity
_ctc_loss_backward.Tensor: grad log_probs targets input_lengths target_lengths neg_log_likelihood log_alpha blank
    zero_infinity
all: self
all.dim: self dim keepdim
any: self
any.dim: self dim keepdim
max: self
min: self
_foreach_norm.Scalar: self ord dtype
sum: self dtype
sum.dim_IntList: self dim keepdim dtype
mean: self dtype
mean.dim: self dim keepdim dtype
linalg_vector_norm: self ord dim keepdim dtype
amax: self dim keepdim
amin: self dim keepdim
addmm: self mat1 mat2 beta alpha
"""


def test_operators_are_there_and_take_what_their_rules_expect() -> None:
    """Of a torch that has them: the fused norm since 2.9, and a rule for ``addmm`` before."""
    rules = kernels._overloads(kernels._KERNELS | kernels._KERNELS_BEFORE_2_9)
    expected = dict(line.split(": ") for line in ARGUMENTS.replace("\n    ", " ").strip().splitlines())
    found = {
        f"{func._overloadpacket.__name__}.{func._overloadname}".removesuffix(".default"): " ".join(
            argument.name for argument in func._schema.arguments
        )
        for func in rules
    }
    if not hasattr(aten, "_fused_rms_norm_backward"):
        del expected["_fused_rms_norm_backward"]
    assert found == expected
    assert set(rules) - set(kernels._RULES) == ({aten.addmm.default} if TORCH_RELEASE >= (2, 9) else set())


def test_an_operator_that_works_in_place_is_known_by_the_name_without_its_underscore() -> None:
    assert kernels.unknown_operators([aten.set_.source_Tensor, aten.renorm.default]) == ["renorm"]


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
    ("bias", "features", "options", "is_fused"),
    [
        (empty(32, dtype=BF16), 64, {}, True),
        (empty(32), 64, {"beta": 0.5}, False),
        (empty(8, 32), 64, {}, False),  # added as a matrix
        (empty(1), 64, {}, False),  # a head with one output
        (empty(32), 1, {}, False),
        (empty(64)[::2], 64, {}, False),
        (empty(32, dtype=INDEX), 64, {}, False),
    ],
)
def test_linear_layer_with_bias_had_a_workspace_of_its_own_before_2_9(
    monkeypatch: pytest.MonkeyPatch, bias: torch.Tensor, features: int, options: dict[str, float], is_fused: bool
) -> None:
    args = (bias, empty(8, features, dtype=bias.dtype), empty(features, bias.shape[-1], dtype=bias.dtype))
    call = aten.addmm.default, args, options, empty(8, bias.shape[-1], dtype=bias.dtype), A100
    if TORCH_RELEASE >= (2, 9):
        assert hidden_bytes(*call) == ()
    monkeypatch.setattr(kernels, "_RULES", kernels._overloads(kernels._KERNELS | kernels._KERNELS_BEFORE_2_9))
    assert hidden_bytes(*call) == ((2**20,) if is_fused else ())


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
