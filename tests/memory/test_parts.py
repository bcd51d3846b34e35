"""The parts of a model in one pass are those that torch lists, in the same order."""

from __future__ import annotations

import pytest
from torch import nn

from hf_memopt.memory.models.loading import load_model
from hf_memopt.memory.models.parts import configs_of, modules_of, parameters_of
from tests.memory.test_repeated_layers import CONFIGS


def shared() -> nn.Module:
    """Return a model in which modules and parameters have several places, and some are None."""
    inner = nn.Linear(2, 2)
    model = nn.ModuleDict({"one": nn.Sequential(inner, nn.Linear(2, 2, bias=False)), "two": nn.ModuleList([inner])})
    model["three"] = nn.Linear(2, 2)
    model["three"].weight = inner.weight
    model.register_module("none", None)
    return model


@pytest.mark.parametrize("name", ["shared", "t5", "llama"])
def test_modules_and_parameters_are_those_of_torch(name: str) -> None:
    model = shared() if name == "shared" else load_model(CONFIGS[name]()).model
    assert list(modules_of(model).items()) == list(model.named_modules())
    found, expected = parameters_of(model), dict(model.named_parameters())
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)


def test_configurations_are_those_of_the_modules() -> None:
    model = load_model(CONFIGS["t5"]()).model
    held = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    assert {id(config) for config in configs_of(model.modules())} == set(held)


class ByProperty(nn.Module):
    @property
    def config(self) -> str:
        return "its own"


def test_a_configuration_may_be_a_property() -> None:
    assert configs_of([ByProperty(), nn.Linear(1, 1)]) == ["its own"]
