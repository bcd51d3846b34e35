"""What a technique cannot do, each with its message and with the model as it was: ``refused_techniques.csv``.

``...`` in ``says`` stands for any text; two names with an "and" for their refusal, as the list of techniques has it.
"""

from __future__ import annotations

import csv
import math
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import bitsandbytes
import heads
import peft
import pytest
import torch
import transformers
from bitsandbytes.optim import LAMB8bit, PagedAdamW
from bitsandbytes.optim.lars import PytorchLARS
from test_embedding_bits import Words
from test_freezing import build as tiny_of
from test_gradient_release import Doubled
from test_quantized_experts import mixture
from torch import nn
from torch.optim import SGD
from transformers import Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_memopt
import tiny
from hf_memopt.training.binding import checkpointing_arguments
from hf_memopt.training.binding.compatibility import refusal_of
from hf_memopt.training.binding.trials import row_count
from hf_memopt.training.techniques.checkpointing.selective import activation_memory_budget

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    # bitsandbytes on a CPU
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
]
IDS = torch.randint(5, 100, (8, 12), generator=torch.Generator().manual_seed(1)).to(tiny.DEVICE)


def streamed(model: Any, **settings: Any) -> Any:
    hf_memopt.stream_layers(model, **settings)
    return model


def normalised(model: Any) -> Any:
    model.model.layers[0].mlp.norm = nn.BatchNorm1d(32)
    return model


def prefixed(model: Any) -> Any:
    return peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def wrapped(kind: type) -> Any:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.module = tiny.llama(num_hidden_layers=5)
    return made


def with_attribute(place: str, name: str, value: Any) -> Any:
    model = tiny.llama(num_hidden_layers=5)
    setattr(attrgetter(place)(model) if "layers" not in place else model.get_submodule(place), name, value)
    return model


def sharing() -> Any:
    model = tiny.llama(num_hidden_layers=5)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


def frozen(model: Any, name: str) -> Any:
    model.get_submodule(name).requires_grad_(False)
    return model


def head(name: str) -> Any:
    return heads.HEADS[name].build()


def of(kind: str, **sizes: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, vocab_size=99, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def albert() -> Any:
    return transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**heads.TINY, embedding_size=8))


def wide_llama() -> Any:
    return tiny.llama(intermediate_size=128)


def broken_llama() -> Any:
    model = wide_llama()
    model.model.layers[0].mlp = nn.Linear(5, 5)
    return model


class OldStyle(transformers.PreTrainedModel):
    """Checkpoints by a flag of its own, in no layer of transformers' class."""

    config_class = transformers.BertConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.gradient_checkpointing = False
        self.post_init()


class InNoStack(OldStyle):
    """Has a checkpointing layer, but in no list."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({"only": GradientCheckpointingLayer()})


class OtherStack(InNoStack):
    """Its only list is one of other layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.others = nn.ModuleList([nn.Linear(2, 2)])


class Quantised(nn.Module):
    """Experts that another quantiser has packed."""

    is_transposed = has_gate = True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 64, 64, dtype=torch.uint8), requires_grad=False)


class OwnStep(bitsandbytes.optim.AdamW8bit):
    """Has a step of its own, where bitsandbytes' one has to be."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Meddling(transformers.TrainerCallback):
    """Takes the registry of the embeddings' bits away again."""

    def on_train_begin(self, *args: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.optimizer.mng = bitsandbytes.optim.GlobalOptimManager.get_instance()
        optimizer.optimizer.mng.override_config(model.embedding.weight, "optim_bits", 8)


def begin(callback: Any, model: Any, **settings: Any) -> None:
    """Begin training as a Trainer does that nobody attached; settings that its arguments would refuse themselves."""
    args = tiny.arguments("unused")
    vars(args).update(settings)
    callback.on_train_begin(args, None, None, model=model, optimizer=SGD(model.parameters()))


def trained(*callbacks: Any, model: Any = None, kind: Any = None, **settings: Any) -> None:
    chosen = {} if kind is None else {"trainer_optimizer_cls_and_kwargs": (kind, {"lr": 0.1})}
    model = (tiny.llama(num_hidden_layers=3) if kind else tiny.bert()) if model is None else model
    rows = [{**row, "labels": row["input_ids"]} for row in tiny.rows(4)] if kind else tiny.rows(4)
    tiny.train(model, rows, "unused", trainer_callbacks=[*callbacks], **chosen, **settings)


_CALLED = (
    *(Doubled, InNoStack, LAMB8bit, Meddling, OldStyle, OtherStack, OwnStep, PagedAdamW, PytorchLARS, Quantised, SGD),
    *(Trainer, Words, activation_memory_budget, albert, begin, broken_llama, checkpointing_arguments, frozen, head),
    *(mixture, normalised, of, prefixed, row_count, sharing, streamed, trained, wide_llama, with_attribute, wrapped),
    *(bitsandbytes.optim.AdamW, bitsandbytes.optim.AdamW8bit, bitsandbytes.optim.AdEMAMix8bit),
    transformers.optimization.Adafactor,
)
NAMES = {one.__name__: one for one in _CALLED} | {name: getattr(hf_memopt, name) for name in hf_memopt.__all__}
NAMES |= vars(hf_memopt.techniques) | vars(hf_memopt.types)
NAMES |= {"IDS": IDS, "math": math, "nn": nn, "peft": peft, "tiny": tiny, "tiny_of": tiny_of, "torch": torch}
NAMES |= {"arguments": lambda **settings: tiny.arguments("unused", **settings), "transformers": transformers}


def state_of(model: Any) -> Any:
    """Return what a technique changes of a model: its parameters, hooks and attributes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [
        (
            name,
            sorted({*vars(module)} - {"_is_accelerate_prepared"}),
            [len(getattr(module, kind)) for kind in hooks],
            module.training,
        )
        for name, module in model.named_modules()
    ] + [
        (name, id(one), one.requires_grad, one.dtype, one.grad is None, len(one._post_accumulate_grad_hooks or ()))
        for name, one in model.named_parameters(remove_duplicate=False)
    ]


ROWS = list(csv.DictReader(Path(__file__).with_name("refused_techniques.csv").read_text("utf-8").splitlines()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} {row['call']}"[:80])
def test_it_is_refused(row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = eval(row["model"] or "nn.Linear(1, 1)", dict(NAMES))
    before, kinds = state_of(model), {"": ValueError, "TypeError": TypeError, "RuntimeError": RuntimeError}
    with pytest.raises(kinds[row["raises"]]) as error:
        eval(row["call"], {**NAMES, "model": model})
    says = row["says"].replace("BITSANDBYTES_VERSION", bitsandbytes.__version__)
    if re.fullmatch(r"[\w\d -]+ and [\w .-]+", says):
        says = str(refusal_of(*says.split(" and ")))
    assert re.fullmatch(re.escape(says).replace(r"\.\.\.", ".*"), str(error.value), re.DOTALL), str(error.value)
    if not re.match(
        r"model|begin|.*Trainer\(", row["call"]
    ):  # calls of the model, and callbacks that act in Trainer(...)
        assert state_of(model) == before
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    assert row["raises"] == "RuntimeError" or not (manager.pid2config or manager.module_weight_config_triple)
