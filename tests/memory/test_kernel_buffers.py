"""The kernels' hidden buffers, worked out by hand from the CUDA source; what cuBLAS keeps; the autocast lists."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import host_semantics
import pytest
import torch
import torch.nn.functional as F
from blocks import A100, BF16, FP32, H100, RTX_3090, T4, Blocks, empty, header, hidden_bytes
from host_semantics import CPU_LISTS
from huggingface_hub.errors import StrictDataclassError
from slow_cases import slow_except
from transformers import AutoConfig

from hf_memopt import estimate
from hf_memopt.binding.model import HEADS
from hf_memopt.memory.cuda import kernel_buffers as kernels
from hf_memopt.memory.cuda import workspace_bytes
from hf_memopt.memory.cuda.attention import TORCH_RELEASE
from hf_memopt.memory.cuda.autocast import OPERATORS, Policy
from tests.memory.small_configs import CONFIGS

aten = torch.ops.aten


# ---- the names and what they take


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (
            "_scaled_dot_product_flash_attention.default",
            "query key value dropout_p is_causal return_debug_mask scale",
        ),
        (
            "_scaled_dot_product_flash_attention_backward.default",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
            "philox_offset scale",
        ),
        (
            "_scaled_dot_product_efficient_attention.default",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
        ),
        (
            "_scaled_dot_product_efficient_attention_backward.default",
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
            "is_causal scale",
        ),
        (
            "native_layer_norm_backward.default",
            "grad_out input normalized_shape mean rstd weight bias output_mask",
        ),
        ("embedding_dense_backward.default", "grad_output indices num_weights padding_idx scale_grad_by_freq"),
        ("index_put.default", "self indices values accumulate"),
        ("index_put_.default", "self indices values accumulate"),
        ("_index_put_impl_.default", "self indices values accumulate unsafe"),
        ("_unsafe_index_put.default", "self indices values accumulate"),
        ("_softmax_backward_data.default", "grad_output output dim input_dtype"),
        ("_safe_softmax.default", "self dim dtype"),
        ("logsumexp.default", "self dim keepdim"),
        ("masked_scatter.default", "self mask source"),
        ("masked_scatter_.default", "self mask source"),
        ("masked_select.default", "self mask"),
        ("scatter_reduce.two", "self dim index src reduce include_self"),
        ("masked_scatter_backward.default", "grad_output mask sizes"),
        (
            "_ctc_loss_backward.Tensor",
            "grad log_probs targets input_lengths target_lengths neg_log_likelihood log_alpha blank zero_infinity",
        ),
        ("all.default", "self"),
        ("all.dim", "self dim keepdim"),
        ("any.default", "self"),
        ("any.dim", "self dim keepdim"),
        ("max.default", "self"),
        ("min.default", "self"),
        ("_foreach_norm.Scalar", "self ord dtype"),
        ("sum.default", "self dtype"),
        ("sum.dim_IntList", "self dim keepdim dtype"),
        ("mean.default", "self dtype"),
        ("mean.dim", "self dim keepdim dtype"),
        ("linalg_vector_norm.default", "self ord dim keepdim dtype"),
        ("amax.default", "self dim keepdim"),
        ("amin.default", "self dim keepdim"),
    ],
)
def test_operator_is_there_and_takes_what_its_rule_expects(name: str, arguments: str) -> None:
    operator, overload = name.split(".")
    func = getattr(getattr(aten, operator), overload)
    assert [argument.name for argument in func._schema.arguments] == arguments.split()
    assert func in kernels._RULES


@pytest.mark.skipif(not hasattr(aten, "_fused_rms_norm_backward"), reason="torch 2.9 and later")
def test_fused_rms_norm_is_there() -> None:
    arguments = aten._fused_rms_norm_backward.default._schema.arguments
    assert [item.name for item in arguments] == [
        "grad_out",
        "input",
        "normalized_shape",
        "rstd",
        "weight",
        "output_mask",
    ]
    assert aten._fused_rms_norm_backward.default in kernels._RULES


def test_table_holds_the_pinned_operators_only() -> None:
    assert len(kernels._RULES) == 34 + (TORCH_RELEASE < (2, 9)) + hasattr(aten, "_fused_rms_norm_backward")


def test_operator_without_a_rule_takes_nothing() -> None:
    assert hidden_bytes(aten.mm.default, (empty(4, 4), empty(4, 4)), {}, empty(4, 4), A100) == ()


# ---- softmax


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_softmax_backward_multiplies_gradient_and_output(dtype: torch.dtype) -> None:
    scores = empty(2, 8, 128, 128, dtype=dtype).requires_grad_()
    with Blocks(T4) as blocks:
        F.softmax(scores, -1).backward(torch.empty_like(scores))
        F.log_softmax(scores, -1).backward(torch.empty_like(scores))
    assert blocks.seen["aten._softmax_backward_data.default"] == [(scores.nbytes,)]
    assert blocks.seen.get("aten._log_softmax_backward_data.default", [()]) == [()]


def test_softmax_of_float16_in_float32_multiplies_in_float32() -> None:
    scores = empty(2, 4, 64, 64, dtype=torch.float16)
    wide = scores.float()
    args = (wide, wide, -1, torch.float16)
    assert hidden_bytes(aten._softmax_backward_data.default, args, {}, scores, T4) == (wide.nbytes,)
    sideways = (wide.transpose(2, 3), wide, -1, torch.float32)
    assert hidden_bytes(aten._softmax_backward_data.default, sideways, {}, wide, T4) == (wide.nbytes, wide.nbytes)


def test_math_attention_with_a_mask_keeps_its_softmax_beside_the_answer() -> None:
    scores = empty(2, 4, 64, 64)
    blocks = hidden_bytes(aten._safe_softmax.default, (scores, -1), {}, scores, T4)
    assert blocks == (scores.nbytes, scores.numel(), scores.numel() // 64)


def test_pictures_are_scattered_by_the_positions_of_a_full_mask() -> None:
    wide, pictures = empty(2, 8, 64), empty(512)
    mask = empty(2, 8, 1, dtype=torch.bool).expand_as(wide)
    scatter, select = aten.masked_scatter.default, aten.masked_scatter_backward.default
    assert hidden_bytes(scatter, (wide, mask, pictures), {}, wide, T4) == (8 * wide.numel(), wide.numel())
    assert hidden_bytes(scatter, (wide, mask.contiguous(), pictures), {}, wide, T4) == (8 * wide.numel(),)
    assert hidden_bytes(select, (wide, mask, [512]), {}, pictures, T4) == (3 * 8 * 512,)


def test_a_mean_that_is_scattered_counts_what_came_to_each_place() -> None:
    out, values, index = empty(10), empty(64), empty(64, dtype=torch.int64)
    for reduce, blocks in (("mean", (values.nbytes, out.nbytes, 10)), ("amax", ())):
        given = (out, 0, index, values, reduce)
        assert hidden_bytes(aten.scatter_reduce.two, given, {"include_self": False}, out, T4) == blocks


def test_ctc_makes_a_second_table_backward() -> None:
    losses, table = empty(2), empty(2, 50, 9)
    given = (losses, empty(50, 2, 5), *(empty(2, dtype=torch.int64) for _ in range(3)), losses, table, 0)
    assert hidden_bytes(aten._ctc_loss_backward.Tensor, given, {}, given[1], T4) == (table.nbytes,)


def test_an_operator_that_works_in_place_is_known_by_the_name_without_its_underscore() -> None:
    assert kernels.unknown_operators([aten.set_.source_Tensor, aten.renorm.default]) == ["renorm"]


def test_logsumexp_makes_the_exponentials() -> None:
    logits, out = empty(4, 1000), empty(4)
    assert hidden_bytes(aten.logsumexp.default, (logits, [1]), {}, out, T4) == (logits.nbytes, out.nbytes)


# ---- operators without a rule


def test_each_operator_without_buffers_exists_and_has_its_source() -> None:
    """Torch may drop or rename one; a rule takes precedence over the table."""
    table = Path(kernels.__file__).with_name("no_buffers.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines()))
    ruled = {func._schema.name.partition("::")[2] for func in kernels._RULES} - {
        "addmm",
        "max",
        "min",
    }  # some overloads
    for row in rows:
        name = row["operator"]
        assert getattr(aten, name, None) or getattr(aten, f"{name}_", None), name
        assert name not in ruled
        assert row["allocates"]
        assert re.fullmatch(r"aten/src/ATen/native/[\w/]+\.(h|cpp|cu|cuh)(:\d+|, \w+ \(2\.\d+\))", row["source"]), name
    assert [row["operator"] for row in rows] == sorted({row["operator"] for row in rows})


SET_UPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"attn_implementation": "eager", "checkpointing": True, "label_smoothing_factor": 0.1},
    "T4": {"gpu": "T4", "precision": "fp16", "micro_batch_size": 1, "eval_batch_size": 2},
    "H100": {"gpu": "H100", "precision": "bf16"},
    "4 bits": {"lora": 4, "load_in": "nf4"},
    "8 bits": {"lora": 4, "load_in": "int8"},
}


def uncounted(config: Any, **settings: Any) -> list[str]:
    found = estimate(config, **{"batch_size": 2, "gpu": "A100 80GB", "precision": "bf16", **settings})
    return [note for note in found.notes if "beside their outputs" in note]


@pytest.mark.parametrize("set_up", SET_UPS)
@pytest.mark.parametrize("name", slow_except(("llama", "vit"), CONFIGS))
def test_what_every_kernel_allocates_is_known(name: str, set_up: str) -> None:
    """Otherwise read the operator's source: a rule in kernel_buffers.py, or a line of no_buffers.csv."""
    assert uncounted(CONFIGS[name](), **SET_UPS[set_up], **({} if name == "vit" else {"seq_len": 24})) == []


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
    for name in (
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
    ):
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


# ---- norms, embeddings, indices


def test_embedding_backward_sorts_and_sums_by_parts() -> None:
    indices, weight = empty(32, 128, dtype=torch.long), empty(30522, 1024).requires_grad_()
    with Blocks(A100) as blocks:
        F.embedding(indices, weight).backward(empty(32, 128, 1024))
    parts = 409 + 4096
    assert blocks.seen["aten.embedding_dense_backward.default"] == [
        (*(5 * (4096 * 8,)), 8, 8, parts * 8, parts * 1024 * 4)
    ]


def test_embedding_backward_of_two_rows_has_few_parts() -> None:
    grad, indices = empty(32, 128, 1024, dtype=BF16), empty(32, 128, dtype=torch.long)
    func = aten.embedding_dense_backward.default
    runs, parts = 2 * 8, 409 + 2
    blocks = (*(3 * (4096 * 8,)), runs, runs, 8, 8, parts * 8, parts * 1024 * 4)
    assert hidden_bytes(func, (grad, indices, 2, -1, False), {}, empty(2, 1024), A100) == blocks
    few = (empty(3072, 16), empty(3072, dtype=torch.long), 2, -1, False)
    assert hidden_bytes(func, few, {}, empty(2, 16), A100) == ()


def test_layer_norm_backward_sums_in_groups_of_rows_only_where_rows_are_many() -> None:
    def blocks(rows: int, columns: int) -> tuple[int, ...]:
        source = empty(rows, columns)
        weight, moments = empty(columns), empty(rows, 1)
        args = (source, source, [columns], moments, moments, weight, weight, [True, True, True])
        return hidden_bytes(aten.native_layer_norm_backward.default, args, {}, (source, weight, weight), A100)

    assert blocks(65536, 768) == ()
    assert blocks(131072, 2048) == ()  # 64 blocks of columns fill half of 108 multiprocessors
    groups = 32 * 1024 // 24
    # then a sum over 1365 groups: 6 blocks of 32 x 4 outputs, 22 shares
    assert blocks(131072, 768) == (*(2 * (groups * 768 * 4,)), 768 * 4, 4 * 768 * 22 * 128, 4 * 6)


@pytest.mark.skipif(not hasattr(aten, "_fused_rms_norm_backward"), reason="torch 2.9 and later")
def test_rms_norm_backward_has_one_weight() -> None:
    source, weight, rstd = empty(131072, 768), empty(768), empty(131072, 1)
    args = (source, source, [768], rstd, weight, [True, True])
    blocks = hidden_bytes(aten._fused_rms_norm_backward.default, args, {}, (source, weight), A100)
    assert blocks == (1365 * 768 * 4, 768 * 4, 4 * 768 * 22 * 128, 4 * 6)


def test_indexing_backward_sorts() -> None:
    source = empty(100, 8).requires_grad_()
    with Blocks(A100) as blocks:
        source[empty(50, dtype=torch.long)].backward(empty(50, 8))
    (found,) = [sizes for name, sizes in blocks.seen.items() if "index_put" in name]
    assert found == [6 * (50 * 8,)]
    args = (source, [empty(50, dtype=torch.long)], empty(50, 8))
    assert hidden_bytes(aten.index_put_.default, args, {}, source, A100) == ()


def test_foreach_norm_has_a_partial_for_every_chunk_of_the_largest() -> None:
    tensors = [empty(70000), empty(10)]
    assert hidden_bytes(aten._foreach_norm.Scalar, (tensors, 2), {}, [empty(1), empty(1)], A100) == (2 * 2 * 4,)


# ---- linear layers, and what stays


@pytest.fixture
def _before_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = kernels._overloads(kernels._KERNELS | kernels._KERNELS_BEFORE_2_9)
    monkeypatch.setattr(kernels, "_RULES", rules)


def linear_blocks(bias: torch.Tensor, rows: int, features: int, **kwargs: float) -> tuple[int, ...]:
    args = (bias, empty(rows, features, dtype=bias.dtype), empty(features, bias.shape[-1], dtype=bias.dtype))
    return hidden_bytes(aten.addmm.default, args, kwargs, empty(rows, bias.shape[-1], dtype=bias.dtype), A100)


def run_linear_layer() -> list[tuple[int, ...]]:
    layer = torch.nn.Linear(64, 32, device="meta")
    with Blocks(A100) as blocks:
        layer(empty(2, 8, 64))
    return blocks.seen["aten.addmm.default"]


@pytest.mark.skipif(TORCH_RELEASE < (2, 9), reason="torch 2.9 and later")
def test_linear_layer_with_bias_shares_a_kept_workspace() -> None:
    assert run_linear_layer() == [()]


@pytest.mark.usefixtures("_before_2_9")
def test_linear_layer_with_bias_had_a_workspace_of_its_own_before_2_9() -> None:
    assert run_linear_layer() == [(2**20,)]
    arguments = [argument.name for argument in aten.addmm.default._schema.arguments]
    assert arguments == ["self", "mat1", "mat2", "beta", "alpha"]


@pytest.mark.usefixtures("_before_2_9")
def test_other_sums_of_products_are_left_to_cublas() -> None:
    assert linear_blocks(empty(32, dtype=BF16), 8, 64) == (2**20,)
    assert linear_blocks(empty(32), 8, 64, beta=0.5) == ()
    assert linear_blocks(empty(8, 32), 8, 64) == ()  # added as a matrix
    assert linear_blocks(empty(1), 8, 64) == ()  # a head with one output
    assert linear_blocks(empty(32), 8, 1) == ()
    assert linear_blocks(empty(64)[::2], 8, 64) == ()
    assert linear_blocks(empty(32, dtype=torch.int64), 8, 64) == ()


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


# ---- autocast


def registered(key: str) -> set[str]:
    """Return the operators with a kernel for a dispatch key; a private function, seen in 2.6 to 2.15."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


CUDA_LISTS = (tuple(OPERATORS), ("binary_cross_entropy",))  # which raises


@pytest.mark.parametrize(("key", "lists"), [("AutocastCUDA", CUDA_LISTS), ("AutocastCPU", CPU_LISTS)])
def test_autocast_lists_hold_each_registered_operator_once(key: str, lists: Sequence[tuple[str, ...]]) -> None:
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


CPU_CALLS: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype, str]] = [
    (lambda x: F.linear(x.float(), x.float()), BF16, "linear"),
    (lambda x: F.mse_loss(x, x), FP32, "mse_loss"),
    (lambda x: torch.cat([x, x.float()]), FP32, "cat"),
    (lambda x: F.softmax(x, -1), BF16, ""),
    (lambda x: F.layer_norm(x, (4,)), BF16, ""),
]


@pytest.mark.parametrize(("call", "dtype", "name"), CPU_CALLS)
def test_autocast_on_the_cpu_follows_the_lists(
    call: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, name: str
) -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert call(torch.zeros(4, 4, dtype=BF16)).dtype is dtype
    policies = {BF16: host_semantics.CPU_LOWER_PRECISION, FP32: host_semantics.CPU_FLOAT32 + host_semantics.CPU_PROMOTE}
    assert not name or name in policies[dtype]


# ---- on a GPU


def measured_blocks(run: Callable[[], object]) -> int:
    """Return the most that a call held beyond what it returned."""
    run()  # the workspaces of the handles stay
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    returned = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak - returned


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["bias", "mean", "embedding", "foreach_norm", "index_put"])
def test_blocks_are_those_of_the_gpu(case: str) -> None:
    device = torch.cuda.get_device_properties(0)
    indices = torch.randint(30522, (32, 128), device="cuda")
    source = torch.ones(4096, 4096, device="cuda")
    func, args = {
        "bias": (aten.sum.dim_IntList, (source, [0])),
        "mean": (aten.mean.default, (source,)),
        "embedding": (aten.embedding_dense_backward.default, (source[:, :1024].clone(), indices, 30522, -1, False)),
        "foreach_norm": (aten._foreach_norm.Scalar, ([source, source[0]], 2)),
        "index_put": (aten.index_put_.default, (source, [indices.view(-1) % 4096], source, True)),
    }[case]
    if case == "embedding":
        args = (args[0].view(32, 128, 1024), *args[1:])
    out = func(*args)
    capability, count = (device.major, device.minor), device.multi_processor_count
    blocks = hidden_bytes(func, args, {}, out, capability, multiprocessors=count)
    predicted = sum(-(-block // 512) * 512 for block in blocks)
    del out
    # the counters of cub's sorts are not modelled: below 1 MiB
    assert 0 <= measured_blocks(lambda: func(*args)) - predicted < (2**20 if case in ("embedding", "index_put") else 1)
