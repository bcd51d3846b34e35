"""The bytes of the stand-ins are those of bitsandbytes' CUDA operations: its own sources run against them.

``cuda_kernels`` executes ``bitsandbytes/backends/cuda/ops.py`` with a native library that does nothing, so the real
modules run on the CPU with every allocation of the CUDA path, and a tracker sees them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from itertools import groupby, product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import bitsandbytes
import peft
import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from slow_cases import slow_except
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.prediction.memory.quantized import quantize, stand_in
from hf_memopt.training.binding import versions
from tiny import llama_config

# bitsandbytes says so for each linear whose input features are no multiple of the block; the bytes are what is tested
pytestmark = [
    pytest.mark.filterwarnings("ignore:inner dimension:UserWarning"),
    # peft 0.21 still asks transformers 5.23 under the names of 5.17
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]

# multiprocessors and compute capability of a GPU that never chooses the fused kernel above 4 rows of 16 bits
UNFUSED = (20, 11, 0)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Tracker(TorchDispatchMode):
    """Births (+bytes) and deaths (-bytes) of storages, also inside the operations of bitsandbytes."""

    def __init__(self, known: list[torch.Tensor], kernels: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.events: list[int] = []
        self._kernels = kernels
        self._live: dict[int, Any] = {}
        for storage in sorted((tensor.untyped_storage() for tensor in known), key=torch.UntypedStorage.nbytes):
            self._add(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        if func.namespace == "bitsandbytes":
            cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            kernel = self._kernels.get(func._schema.name.partition("::")[2], partial(func.redispatch, cpu))
            with self:
                out = kernel(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
            if "empty" in func._schema.name:
                out.zero_()  # what a kernel that does nothing leaves must not look like an outlier
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._live or size_bytes == 0:
            return
        self.events.append(size_bytes)

        def died(_: Any) -> None:
            del self._live[key]
            self.events.append(-size_bytes)

        self._live[key] = weakref.ref(storage, died)

    @property
    def live(self) -> int:
        return sum(self.events)

    @property
    def peak(self) -> int:
        total = peak = 0
        for size_bytes in self.events:
            total += size_bytes
            peak = max(peak, total)
        return peak


class Native:
    """A native library whose every function does nothing and returns 0."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*_: Any) -> int:
            return 0

        setattr(self, name, function)
        return function


def cuda_kernels(gpu: tuple[int, int, int] = UNFUSED) -> dict[str, Callable[..., Any]]:
    """Return bitsandbytes' CUDA kernels, the Python around the native code, by the name of their operation."""
    kernels: dict[str, Callable[..., Any]] = {}

    def register(name: str, device: str) -> Callable[..., Any]:
        def keep(kernel: Callable[..., Any]) -> Callable[..., Any]:
            kernels[name.partition("::")[2]] = kernel
            return kernel

        return keep

    path = Path(bitsandbytes.__file__).parent / "backends" / "cuda" / "ops.py"
    module = ModuleType("bitsandbytes.backends.cuda.ops")
    module.__package__ = "bitsandbytes.backends.cuda"
    with (
        mock.patch("bitsandbytes._ops.register_kernel", register),
        mock.patch("bitsandbytes.cextension.lib", Native()),
        mock.patch("torch._C._cuda_getCurrentRawStream", create=True),
    ):
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    module.CUBLAS_Context = mock.MagicMock()  # type: ignore[attr-defined]
    module._gpu_dispatch_props = lambda _: gpu  # type: ignore[attr-defined]
    return kernels


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return every tensor that a module keeps, those of bitsandbytes' states included, each storage once."""
    found = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        states = [getattr(getattr(part, "weight", None), "quant_state", None)]
        states += [getattr(states[0], "state2", None), getattr(part, "state", None), getattr(part, "weight", None)]
        for name in ("absmax", "code", "offset", "CB", "SCB"):
            found += [vars(state).get(name) for state in states if state is not None]
    found = [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
    return list({tensor.untyped_storage()._cdata: tensor for tensor in found}.values())


def sizes_of(module: nn.Module) -> list[int]:
    return sorted(tensor.untyped_storage().nbytes() for tensor in tensors_of(module))


def passes(
    linear: nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kernels: dict[str, Callable[..., Any]],
    grad: bool = True,
) -> tuple[list[int], list[int], list[int]]:
    """Run a linear twice, since the first pass casts the bias; return live bytes after forward, peaks and events."""
    device = linear.weight.device
    x = torch.randn(shape, device=device).to(dtype).requires_grad_(grad)
    out_grad = torch.zeros((*shape[:-1], linear.out_features), device=device, dtype=dtype)
    live, peaks = [], []
    with Tracker([x, out_grad, *tensors_of(linear)], kernels) as tracker:
        for _ in range(2):
            out = linear(x)
            live.append(tracker.live)
            if grad:
                out.backward(out_grad)
            del out
            x.grad = None
            peaks.append(tracker.peak)
            events = in_order(tracker.events)
    return live, peaks, events


def in_order(events: list[int]) -> list[int]:
    """Return events with the deaths that no birth divides sorted: an allocator ends the same in any order of them."""
    groups = [list(group) for _, group in groupby(events, key=lambda size_bytes: size_bytes > 0)]
    return [size_bytes for group in groups for size_bytes in (group if group[0] > 0 else sorted(group))]


def quantized_linear(
    features: tuple[int, int] = (64, 96),
    bias: bool = True,
    weight_dtype: torch.dtype = torch.float32,
    bits: int = 4,
    **settings: Any,
) -> nn.Module:
    """Return a real linear of bitsandbytes, quantised on the CPU."""
    if bits == 8:
        linear = Linear8bitLt(*features, bias=bias, has_fp16_weights=False, **settings)
    else:
        linear = Linear4bit(*features, bias=bias, **settings)
        linear.support_avx512bf16_for_cpu = False  # it would repack the weight for evaluation, on the CPU only
    with torch.no_grad():
        linear.weight.data = torch.randn(features[::-1]).to(weight_dtype)
    linear.requires_grad_(False)
    return linear.to("cpu")


def same(linear: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, *, grad: bool = True, **kernels: Any) -> None:
    """Check that a real linear, its stand-in on the CPU and the one on meta have the same bytes, event by event."""
    on_cpu = type(stand_in(linear))(linear, "cpu")
    assert sizes_of(stand_in(linear)) == sizes_of(on_cpu) == sizes_of(linear)
    real = passes(copy.deepcopy(linear), shape, dtype, kernels, grad)
    assert passes(on_cpu, shape, dtype, {}, grad) == real
    assert passes(stand_in(linear), shape, dtype, {}, grad) == real


@pytest.fixture(scope="module")
def kernels() -> dict[str, Callable[..., Any]]:
    return cuda_kernels()


FAST_4BIT = (("nf4", True, (33, 7)), ("fp4", False, (64, 96)))
ALL_4BIT = product(("nf4", "fp4"), (False, True), ((64, 96), (100, 36), (33, 7)))


@pytest.mark.parametrize(("quant_type", "nested", "features"), slow_except(FAST_4BIT, ALL_4BIT))
def test_4bit_bytes_are_those_of_the_cuda_sources(kernels, quant_type, nested, features):
    settings = product((None, *FLOATS), FLOATS, (torch.float32, torch.bfloat16), (False, True))
    for compute_dtype, dtype, weight_dtype, bias in settings:
        options = {"quant_type": quant_type, "compress_statistics": nested, "compute_dtype": compute_dtype}
        linear = quantized_linear(features, bias, weight_dtype, **options)
        same(linear, (2, 7, features[0]), dtype, **kernels)


@pytest.mark.parametrize("shape", [(1, 64), (4, 64), (2, 2, 64), (5, 64), (7, 64), (8, 64), (2, 2, 2, 64), (1600, 64)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("grad", [True, False])
def test_4bit_rows(kernels, shape, dtype, grad):
    same(quantized_linear(compress_statistics=True), shape, dtype, grad=grad, **kernels)


@pytest.mark.parametrize("features", slow_except([((33, 7),)], [((64, 96),), ((36, 100),), ((33, 7),)]))
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_8bit_bytes_are_those_of_the_cuda_sources(kernels, threshold, features):
    for dtype, bias, shape, grad in product(FLOATS, (False, True), ((5,), (2, 7), (1,)), (True, False)):
        linear = quantized_linear(features, bias, torch.float16, bits=8, threshold=threshold)
        # training on the CPU takes a path of its own (MatMul8bitFp); evaluation takes that of CUDA
        same(linear.eval(), (*shape, features[0]), dtype, grad=grad, **kernels)


def quantized_llama(folder: Path, dtype: torch.dtype, config: dict[str, Any], **settings: Any) -> nn.Module:
    """Return a tiny Llama that ``from_pretrained`` quantised on the CPU."""
    transformers.LlamaForCausalLM(llama_config(**settings)).save_pretrained(folder)
    bits = transformers.BitsAndBytesConfig(**config)
    options = {"quantization_config": bits, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def meta_llama(dtype: torch.dtype, **settings: Any) -> nn.Module:
    config = llama_config(**settings)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


@pytest.fixture
def cuda_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 8-bit linears train on the CPU by the function that they train with on CUDA."""
    functions = bitsandbytes.autograd._functions
    monkeypatch.setattr(functions, "MatMul8bitFp", functions.MatMul8bitLt)


def trace(model: nn.Module, kernels: dict[str, Callable[..., Any]]) -> Tracker:
    """Run one training step's passes of a language model."""
    model.train()
    ids = torch.full((4, 16), 7, device=next(model.parameters()).device)
    with Tracker([ids, *tensors_of(model)], kernels) as tracker:
        loss = model(input_ids=ids, labels=ids).loss
        tracker.after_forward = tracker.live
        loss.backward()
        del loss
        tracker.after_backward = tracker.live
    return tracker


LORA = partial(peft.LoraConfig, r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.05)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MODES = {
    "nf4": NF4,
    "nf4 nested bf16": {**NF4, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"},
    "8 bits": {"load_in_8bit": True},
}


FAST_QLORA = (("nf4 nested bf16", torch.bfloat16), ("8 bits", torch.bfloat16))
ALL_QLORA = (*((mode, torch.bfloat16) for mode in MODES), ("nf4", torch.float32))


@pytest.mark.parametrize("prepares", slow_except([True], [False, True]))
@pytest.mark.parametrize(("mode", "dtype"), slow_except(FAST_QLORA, ALL_QLORA))
def test_qlora_has_the_bytes_of_the_real_model(tmp_path, cuda_training, kernels, mode, dtype, prepares):
    """Also after PEFT's own ``prepare_model_for_kbit_training``."""
    models = [quantized_llama(tmp_path, dtype, MODES[mode]), quantize(meta_llama(dtype), MODES[mode])]
    if prepares:
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        models = [peft.prepare_model_for_kbit_training(model, **options) for model in models]
    real, here = (peft.get_peft_model(model, LORA()) for model in models)
    assert versions.is_checkpointing(here.base_model.model) == prepares
    for part in real.modules():
        if isinstance(part, Linear4bit):
            part.support_avx512bf16_for_cpu = False
    wrapped = [{type(part) for part in model.modules() if "peft" in type(part).__module__} for model in (real, here)]
    assert wrapped[0] == wrapped[1]
    assert here.get_nb_trainable_parameters() == real.get_nb_trainable_parameters()
    assert sizes_of(here) == sizes_of(real)
    traced, expected = trace(here, {}), trace(real, kernels)
    assert (traced.after_forward, traced.after_backward) == (expected.after_forward, expected.after_backward)
    assert traced.peak == expected.peak


def linears(model: nn.Module) -> dict[str, str]:
    """Return the kind of each linear by name."""
    kinds = {Linear4bit: "4", Linear8bitLt: "8", nn.Linear: "plain", transformers.pytorch_utils.Conv1D: "plain"}
    found = [(name, [kinds[kind] for kind in kinds if isinstance(one, kind)]) for name, one in model.named_modules()]
    return {name: of_it[0] for name, of_it in found if of_it}


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"load_in_4bit": True}, {}),
        ({"load_in_4bit": True}, {"tie_word_embeddings": True}),
        ({"load_in_8bit": True, "llm_int8_skip_modules": ["layers.0", "lm_head"]}, {}),
        ({"load_in_4bit": True, "llm_int8_skip_modules": ["v_proj"]}, {"attention_bias": True}),
    ],
)
def test_quantize_replaces_what_from_pretrained_replaces(tmp_path, config, settings):
    real = quantized_llama(tmp_path, torch.bfloat16, config, **settings)
    here = quantize(meta_llama(torch.bfloat16, **settings), config)
    assert linears(here) == linears(real)
    assert sizes_of(here) == sizes_of(real)
    trained = [{name: one.requires_grad for name, one in model.named_parameters()} for model in (here, real)]
    assert trained[0] == trained[1]
    assert {p.device.type for p in here.parameters()} == {"meta"}
    assert (here.is_quantized, here.quantization_method) == (real.is_quantized, real.quantization_method)
    for name in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        assert getattr(here, name, False) == getattr(real, name, False)


def test_private_names():
    for multiplied, dtype in ((torch._int_mm, torch.int8), (torch.ops.aten.matmul, torch.float32)):
        assert multiplied(torch.ones(2, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype)).tolist() == [[4] * 3] * 2
    names = {"gemm_4bit", "dequantize_4bit", "dequantize_blockwise", "int8_vectorwise_quant", "int8_linear_matmul"}
    assert names <= set(cuda_kernels())
