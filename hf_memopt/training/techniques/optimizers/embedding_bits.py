"""Keep the optimizer state of embeddings in 32 bits under any 8-bit optimizer of bitsandbytes.

Why 32: the tokens of a text are very unevenly distributed, and so are the gradients of an embedding's rows. For that
the paper on 8-bit optimizers (https://arxiv.org/abs/2110.02861) treats embeddings apart, and bitsandbytes' own
``StableEmbedding`` asks for 32 bits. The price is about 6 bytes per element under Adam (8 instead of about 2).

Stock ``Trainer`` asks for it too, but only with its own ``optim`` names, and in a process-wide registry. It misses
``optimizers=(AdamW8bit(...), None)``, ``optimizer_cls_and_kwargs=(AdamW8bit, {...})`` and states resumed in 8 bits; it
keeps the embeddings of every model alive for ever; and it gives their 32 bits to whatever parameter has the same
position in a later model. Here each optimizer gets a registry of its own.

Limitations: an untied output head (an ``nn.Linear``) is not an embedding; register it with bitsandbytes'
``GlobalOptimManager``, and it is taken over. States smaller than bitsandbytes' ``min_8bit_size`` (4,096 elements) are
always in 32 bits.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_blockwise
from bitsandbytes.optim.optimizer import GlobalOptimManager, Optimizer8bit
from torch import nn

from hf_memopt.plain_data import check_value
from hf_memopt.training.binding.model import check_model, tensors_in, unwrap_optimizer
from hf_memopt.training.binding.undo import UndoHandle
from hf_memopt.training.techniques import TechniqueCallback
from hf_memopt.units import format_bytes

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 256  # elements per absmax value in a quantised state, seen in bitsandbytes 0.50.0 and 0.50.2
_QUANTISATION_TABLES = ("qmap1", "qmap2")


def override_embedding_bits(model: nn.Module, optimizer: torch.optim.Optimizer, bits: int = 32) -> UndoHandle:
    """Keep the optimizer state of every ``nn.Embedding`` weight of ``model`` in 32 bits.

    Works before the first step and after it: an 8-bit state, resumed or trained, is dequantised with its values.
    Overrides of other parameters of this model that were registered with bitsandbytes' ``GlobalOptimManager`` go on
    working, and nothing of this model stays in it.

    Args:
        model: its embeddings may be tied, frozen or not in the optimizer; the latter two have no state.
        optimizer: an 8-bit optimizer of bitsandbytes or a subclass, as it is or wrapped by accelerate.
        bits: 32; no other number is supported.

    Returns:
        A handle whose ``remove()`` takes the bits of the embeddings back; the optimizer keeps a registry of its own.
        States that were dequantised stay in 32 bits. The handle keeps neither model nor optimizer alive.

    Raises:
        TypeError: ``optimizer`` is not an optimizer of bitsandbytes.
        ValueError: it has 32-bit states; ``bits`` is not 32; ``model`` has no embeddings.

    Examples:
        >>> from bitsandbytes.optim import AdamW8bit
        >>> model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 64))
        >>> optimizer = AdamW8bit(model.parameters())
        >>> handle = override_embedding_bits(model, optimizer)
        >>> model(torch.arange(8)).sum().backward()
        >>> optimizer.step()
        >>> optimizer_state_bytes(optimizer)  # 2 x 32,768 and the bias; 2 x 4,096 with one scale per block of 256
        {'float32': 66176, 'uint8': 8192}
    """
    check_value("bits", bits, Literal[32], 32)
    eight_bit = _eight_bit_optimizer(optimizer)
    embeddings = _embedding_weights(model)
    if not embeddings:
        raise ValueError(
            f"model={type(model).__name__} has no nn.Embedding; expected a model with embeddings. Leave the call out."
        )
    singleton_class: Any = GlobalOptimManager
    eight_bit.mng = _moved_registrations(model, (eight_bit.mng, singleton_class.get_instance()))
    former = dict(eight_bit.mng.pid2config)
    bits_of = {id(weight): {**former.get(id(weight), {}), "optim_bits": bits} for weight in embeddings.values()}
    _register(eight_bit, former | bits_of)
    _dequantise_states(eight_bit, bits_of.keys())
    reference = weakref.ref(eight_bit)

    def undo() -> None:
        if (alive := reference()) is not None:
            _register(alive, former)

    return UndoHandle(undo)


def _register(optimizer: Any, configs: dict[int, dict[str, Any]]) -> None:
    optimizer.mng.pid2config, optimizer.mng.index2config = dict(configs), {}
    optimizer.mng.register_parameters(optimizer.param_groups)  # by position too


class EmbeddingBitsCallback(TechniqueCallback):
    """Keep the optimizer state of embeddings in 32 bits, and check the dtypes after the first optimizer step.

    The result is logged in one line, with the bytes of the whole optimizer state. It adds no keys to the Trainer's
    logs. A model without embeddings, as of images, is left as it is.

    Args:
        bits: 32; no other number is supported.

    Attributes:
        handle: undoes the override of the last run; None before the first.

    Raises:
        ValueError: as ``override_embedding_bits`` does; wrong ``bits`` at once, the others when training begins.
        TypeError: as ``override_embedding_bits`` does, when training begins.
        RuntimeError: an embedding's state is not in float32 after the first step.
    """

    technique = "32-bit embeddings"

    def __init__(self, bits: int = 32) -> None:
        check_value("bits", bits, Literal[32], 32)
        super().__init__()
        self.bits = bits
        self._is_checked = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Override the bits; checkpoints are loaded before this event."""
        super().on_train_begin(args, state, control)
        self._is_checked = not _embedding_weights(model)
        if self._is_checked:
            logger.info(f"EmbeddingBitsCallback has nothing to do: {type(model).__name__} has no nn.Embedding")
            return
        inner = unwrap_optimizer(optimizer)
        if self._handles.model is inner:
            self._handles.remove()  # a second train() with the same optimizer: one undo has to be enough
        self.handle = self._handles.keep(inner, override_embedding_bits(model, inner))

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Check and log once, after the first step that was not skipped for an overflow."""
        inner = unwrap_optimizer(optimizer)
        if not self._is_checked and inner.state:
            self._is_checked = True
            count = _check_dtypes(model, inner)
            sizes = ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in optimizer_state_bytes(inner).items())
            states = f"{count} embedding state{'' if count == 1 else 's'}"
            logger.info(f"EmbeddingBitsCallback keeps {states} in float32; the whole optimizer state is {sizes}")


def _eight_bit_optimizer(optimizer: Any) -> Any:
    inner: Any = unwrap_optimizer(optimizer)
    name = f"{type(inner).__module__}.{type(inner).__qualname__}"
    fix = 'Set, for example, TrainingArguments(optim="adamw_8bit").'
    if not issubclass(type(inner), Optimizer8bit):
        raise TypeError(f"optimizer={name} has no 8-bit state; expected an 8-bit optimizer of bitsandbytes. {fix}")
    if inner.args.optim_bits != 8:
        raise ValueError(
            f"optimizer={name} keeps its state in {inner.args.optim_bits} bits; expected optim_bits=8. {fix}"
        )
    return inner


def _embedding_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of all embeddings by parameter name, tied ones once."""
    names: dict[torch.Tensor, str] = {}
    check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            names.setdefault(module.weight, f"{name}.weight".lstrip("."))
    return {name: weight for weight, name in names.items()}


def _moved_registrations(model: nn.Module, sources: Iterable[Any]) -> Any:
    """Return a registry for one optimizer, with the registrations of ``model``, which the sources then lack.

    A registry of bitsandbytes has the same override up to three times: by module and attribute
    (``module_weight_config_triple``), by the parameter's id (``pid2config``), and, once an optimizer has read it, by
    group and position (``index2config``), which names no parameter. Entries by position share the configuration object
    of the parameter for which they were made, and are found by it. Ids are enough for an optimizer that exists.
    """
    manager: Any = GlobalOptimManager.__new__(GlobalOptimManager)  # the class itself only constructs its singleton
    manager.initialize()
    modules, parameters = set(model.modules()), {id(parameter) for parameter in model.parameters()}
    for source in sources:
        own = [(key, config) for key, config in source.pid2config.items() if key in parameters]
        for module, name, config in source.module_weight_config_triple:
            if module in modules:
                own.append((id(getattr(module, name, None)), config))
        for key, config in own:
            manager.pid2config[key] = {**manager.pid2config.get(key, {}), **config}
            source.pid2config.pop(key, None)
        source.module_weight_config_triple = [
            triple for triple in source.module_weight_config_triple if triple[0] not in modules
        ]
        source.index2config = {
            position: config
            for position, config in source.index2config.items()
            if not any(config is moved for _, moved in own)
        }
    return manager


def _dequantise_states(optimizer: Any, targets: Collection[int]) -> None:
    """Replace the 8-bit states of the parameters with these ids by 32-bit ones of the same values."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            if id(parameter) not in targets or "absmax1" not in state:
                continue
            former = dict(state)
            state.clear()
            optimizer.init_state(group, parameter, group_index, index)  # allocates as it does: paged, of any shape
            for key in state:
                if key in ("state1", "state2"):
                    state[key].copy_(_dequantised(former, key[-1]))
                elif key in former:
                    state[key] = former[key]


def _dequantised(state: dict[str, Any], number: str) -> torch.Tensor:
    """Return a state in float32: of the parameter's shape, or two such halves where AdEMAMix keeps two averages."""
    values, scales, table = (state[f"{key}{number}"] for key in ("state", "absmax", "qmap"))
    # the two averages of AdEMAMix have scales of shape (2, blocks): the blocks of each begin anew
    averages = zip(values, scales, strict=True) if scales.dim() == 2 else [(values, scales)]
    found = [
        dequantize_blockwise(one.reshape(-1), absmax=of_one, code=table, blocksize=_BLOCK_SIZE)
        for one, of_one in averages
    ]
    return torch.cat(found).reshape(values.shape)


def _check_dtypes(model: nn.Module, optimizer: Any) -> int:
    """Raise for an embedding whose state is not in float32; return how many embeddings have a state."""
    names = {name: weight for name, weight in _embedding_weights(model).items() if optimizer.state.get(weight)}
    for name, weight in names.items():
        dtype = str(optimizer.state[weight]["state1"].dtype).removeprefix("torch.")
        if dtype != "float32":
            raise RuntimeError(
                f"bits=32 was set for the state of {name!r}, which is in {dtype} after the first step; expected "
                f"float32. Keep other code from setting optimizer.mng (bitsandbytes {bitsandbytes.__version__})."
            )
    return len(names)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of all tensors in an optimizer's state by dtype name.

    Each storage counts once and as a whole; of a sharded tensor the local part counts. bitsandbytes' quantisation
    tables (``qmap1`` and ``qmap2``, 1 KiB each, shared by all parameters) do not count.
    """
    storages: dict[Any, tuple[str, int]] = {}
    for state in unwrap_optimizer(optimizer).state.values():
        for tensor in _plain_tensors(state):
            storage = tensor.untyped_storage()
            key = (storage.device, storage.data_ptr()) if storage.data_ptr() else id(tensor)  # meta has no addresses
            storages.setdefault(key, (str(tensor.dtype).removeprefix("torch."), storage.nbytes()))
    sizes: Counter[str] = Counter()
    for dtype, size in storages.values():
        sizes[dtype] += size
    return dict(sorted(sizes.items()))


def _plain_tensors(state: Any) -> list[torch.Tensor]:
    """Return the plain tensors in one parameter's state, also those inside tensor subclasses (sharded, quantised)."""
    if isinstance(state, Mapping):
        state = [value for name, value in state.items() if name not in _QUANTISATION_TABLES]
    plain: list[torch.Tensor] = []
    for tensor in tensors_in(state):
        if hasattr(tensor, "__tensor_flatten__"):
            plain += _plain_tensors([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            plain.append(tensor)
    return plain
