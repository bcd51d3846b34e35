"""What selective checkpointing keeps, by the names of the installed torch; the memory budget of compiled graphs."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch._functorch.config as functorch
from torch import nn

from hf_memopt.techniques.checkpointing.selective import KEPT_ATTENTIONS, KEPT_PRODUCTS, activation_memory_budget


def test_the_names_of_operations_are_those_of_the_installed_torch_and_bitsandbytes() -> None:
    importlib.import_module("bitsandbytes")  # it registers its operations
    for name in KEPT_PRODUCTS | KEPT_ATTENTIONS:
        library, _, operation = name.rpartition("::")
        if library in ("aten", "bitsandbytes"):
            overload = getattr(getattr(torch.ops, library), operation).default
            assert overload.name() == name
            drops = [argument.name for argument in overload._schema.arguments if argument.name == "dropout_p"]
            assert len(drops) == (name in KEPT_ATTENTIONS), name
        else:
            assert library == "flash_attn" or getattr(torch.ops.higher_order, operation).name() == name


# of torch 2.13, when its compiler is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_graph_saves_less_within_a_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(256, 64)
    found = {}
    for fraction in (1.0, 0.5, 0.0):
        torch._dynamo.reset()  # the name that torch documents for compiling anew
        with activation_memory_budget(fraction):
            compiled = torch.compile(model, backend="aot_eager_decomp_partition")
            held: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), t)[1], lambda t: t):  # noqa: B023
                loss = compiled(x).square().mean()
            model.zero_grad()
            loss.backward()
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in held if t.data_ptr() not in weights}
        found[fraction] = sum(storages.values()), [parameter.grad.clone() for parameter in model.parameters()]
    assert found[0.0][0] < found[0.5][0] < found[1.0][0]
    for fraction in (0.5, 0.0):
        assert all(torch.equal(*pair) for pair in zip(found[fraction][1], found[1.0][1], strict=True))
    assert functorch.activation_memory_budget == 1.0
