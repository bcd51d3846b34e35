"""What each checkpointing policy saves, and what it computes again: python benchmarks/checkpointing.py

By the estimator: bytes of activations (logits and loss included) when the forward pass ends, the peak of forward and
backward pass, and the operations of the step above those without checkpointing. The budgets of torch.compile are
measured: bytes of the tensors that the graph of a small compiled network holds on the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from results_file import markdown, show
from torch import nn

from hf_memopt.units import percent

CASES: dict[str, dict[str, Any]] = {
    "BERT-large, 32 x 128": {"model": "bert-large-uncased", "batch_size": 32, "seq_len": 128},
    "Llama-3.2-1B, 2 x 512": {"model": "Llama-3.2-1B", "batch_size": 2, "seq_len": 512},
}
POLICIES: dict[str, tuple[str | None, ...]] = {
    "BERT-large, 32 x 128": (None, "first_12", "every_2", "selective", "full"),
    "Llama-3.2-1B, 2 x 512": (None, "first_8", "every_2", "selective", "full"),
}
SETTINGS = {"gpu": "RTX 3060 12GB", "precision": "bf16"}
BUDGETS = (1.0, 0.5, 0.25, 0.0)


def policy_figures(case: str) -> dict[str, dict[str, int]]:
    """Estimate a case with each policy."""
    from hf_memopt.prediction.memory import estimate
    from hf_memopt.prediction.memory.tracking import COMPONENTS
    from hf_memopt.training.techniques.checkpointing.policies import checkpoint_layers

    kept = [COMPONENTS.index(name) for name in ("activations", "logits and loss")]
    figures = {}
    for policy in POLICIES[case]:
        prepare = () if policy is None else (partial(checkpoint_layers, policy=policy),)
        found = estimate(**CASES[case], **SETTINGS, prepare=prepare)
        phases, components = found.timeline.phases, found.timeline.components
        index = max(i for i, (_, phase) in enumerate(phases) if phase == "backward")
        (forward, _), (backward, _), (end, _) = phases[index - 1 : index + 2]
        figures[policy or "none"] = {
            "saved_bytes": int(components[backward - 1, kept].sum()),
            "peak_bytes": int(components[forward:end].sum(axis=1).max()),
            "flops": found.flops,
        }
    return figures


def budget_figures() -> dict[str, int]:
    """Measure what a compiled network of four blocks, of 512 rows of 256 numbers, saves within each budget."""
    from hf_memopt.training.techniques.checkpointing.selective import activation_memory_budget

    torch.manual_seed(0)
    blocks = [(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(4)]
    network = nn.Sequential(*(layer for block in blocks for layer in block))
    weights = {parameter.data_ptr() for parameter in network.parameters()}
    rows = torch.randn(512, 256)
    figures = {}
    for budget in BUDGETS:
        torch.compiler.reset()
        held: dict[int, torch.Tensor] = {}
        with activation_memory_budget(budget), torch.autograd.graph.saved_tensors_hooks(_keeper(held), _same):
            loss = torch.compile(network, backend="aot_eager_decomp_partition")(rows).square().mean()
        figures[f"budget_{budget:g}"] = sum(
            tensor.untyped_storage().nbytes() for address, tensor in held.items() if address not in weights
        )
        loss.backward()
    return figures


def _keeper(held: dict[int, torch.Tensor]) -> Any:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.data_ptr()] = tensor
        return tensor

    return keep


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def table(figures: dict[str, Any]) -> str:
    """Return the policies, one below the other, and the budgets under them."""
    head = "| policy | saved by the forward pass | of none | operations of the step | peak of forward and backward |"
    rows: list[Any] = []
    for case, policies in figures["policies"].items():
        rows.append(f"| **{case}** | | | | |")
        plain = policies["none"]
        for policy, found in policies.items():
            share = found["saved_bytes"] / plain["saved_bytes"]
            again = found["flops"] / plain["flops"] - 1
            sizes = [f"{found[name] / 2**20:,.0f} MiB" for name in ("saved_bytes", "peak_bytes")]
            name = policy if policy == "none" else f'`"{policy}"`'
            rows.append((name, sizes[0], percent(share), percent(again, 1, signed=True), sizes[1]))
    plain_bytes = figures["budgets"]["budget_1"]
    budgets = ", ".join(
        f'`"{budget}"` {percent(saved / plain_bytes)}'
        for budget, saved in figures["budgets"].items()
        if saved < plain_bytes
    )
    note = (
        f"Estimated for one step in {figures['precision']} autocast with AdamW on the {figures['gpu']} "
        "(`python benchmarks/checkpointing.py`). *Saved* counts activations, logits and loss. The peak also has "
        "weights, gradients and optimizer state. On a small compiled network the policies of `torch.compile` keep "
        f"these shares of the saved bytes: {budgets}."
    )
    return markdown(head, rows, note)


def main() -> None:
    """Estimate, measure, print the table, append the row."""
    figures = {**SETTINGS, "policies": {case: policy_figures(case) for case in CASES}, "budgets": budget_figures()}
    show("checkpointing", figures, table(figures))


if __name__ == "__main__":
    main()
