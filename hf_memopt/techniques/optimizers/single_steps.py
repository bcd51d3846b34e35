"""Whether the parameters of an optimizer can step one at a time, found by trying it on a few numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

__all__ = ["coupling", "plain_step", "step_alone"]

TRIAL_STEPS = 2  # the second one starts from a state
TRIAL_SIZE = 8  # of each dimension


def plain_step(step: Any) -> Any:
    """Return the step of an optimizer class without the wrapper by which torch runs step hooks.

    ``hooked``, its mark, is no private name but undocumented: seen in torch 2.13.
    """
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def step_alone(optimizer: Any, step: Callable[[], Any], parameter: torch.Tensor, group_index: int) -> None:
    """Run ``step``, the optimizer's own, so that it sees one parameter only, with its group's present options."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[group_index], "params": [parameter]}]
    try:
        step()
    finally:
        optimizer.param_groups = groups


def coupling(optimizer_class: Any, groups: list[dict[str, Any]], args: Any, kwargs: Any) -> str | None:
    """Return what shows that the step of one parameter depends on the others; None if nothing does.

    Two small parameters per group, of the device and dtype of the real ones, step together in one optimizer and one at
    a time in another. Random numbers are left as they were.

    Args:
        optimizer_class: the class in question.
        groups: parameter groups of an optimizer of that class.
        args: what that optimizer was built with, after its parameters.
        kwargs: likewise.

    Raises:
        Exception: whatever the class raises with such parameters.
    """
    trial = _trial_groups(groups)
    if not trial:
        return None
    devices = {parameter.device for group in groups for parameter in group["params"]}
    cards = [device for device in devices if device.type in ("cuda", "xpu")]
    kind = cards[0].type if cards else "cuda"
    results = []
    options: list[list[dict[str, Any]]] = []
    with warnings.catch_warnings(action="ignore"):  # the optimizer that is trained with gives its own
        for is_together in (True, False):
            with torch.random.fork_rng([card.index for card in cards], device_type=kind):  # the same numbers
                optimizer = optimizer_class(copy.deepcopy(trial), *args, **kwargs)
                options.append([_options(group) for group in optimizer.param_groups])
                getattr(optimizer, "train", lambda: None)()  # schedule-free ones have modes
                _run_trial(optimizer, is_together)
            options.append([_options(group) for group in optimizer.param_groups])
            results.append([parameter for group in optimizer.param_groups for parameter in group["params"]])
    counters = sorted({key for old, new in zip(*options[:2], strict=True) for key in _changed(old, new)})
    if counters:
        return f"its step changes param_groups: {', '.join(counters)}"
    if not all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
        return "two of them end elsewhere than in a step together"
    return None


def _trial_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    trial = []
    for group in groups:
        candidates = [parameter for parameter in group["params"] if parameter.is_floating_point()]  # not quantised ones
        if not candidates:
            continue
        model = max(candidates, key=lambda parameter: parameter.dim())
        shape = [min(size, TRIAL_SIZE) for size in model.shape]
        parameters = [torch.nn.Parameter(_numbers(shape, number).to(model)) for number in (1, 2)]
        trial.append({**_options(group), "params": parameters})
    return trial


def _run_trial(optimizer: Any, is_together: bool) -> None:
    step = partial(plain_step(type(optimizer).step), optimizer)
    for number in range(TRIAL_STEPS):
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                parameter.grad = _numbers(parameter.shape, 3 + number + 2 * index).to(parameter)
        if is_together:
            step()
            continue
        for group_index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                step_alone(optimizer, step, parameter, group_index)


def _numbers(shape: Iterable[int], seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "param_names")})


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [key for key in new if key not in old or not _is_same(old[key], new[key])]


def _is_same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one, other)
    return bool(one == other)
