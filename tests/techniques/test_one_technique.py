"""A technique is one file and one entry of the list: a toy that touches nothing else is known to all that read it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import hf_memopt
import tiny
from hf_memopt import attach, plan
from hf_memopt.gpus import custom_gpu
from hf_memopt.prediction.memory import estimate_of
from hf_memopt.prediction.memory.settings import BatchShape
from hf_memopt.prediction.recipes.planning.set_ups import ModelFacts, set_ups
from hf_memopt.technique_list import TECHNIQUES, Technique
from hf_memopt.training.binding.compatibility import refusal_of

TOY = '''
"""Train a model without its embeddings: a toy."""

from hf_memopt.training.binding.parameters.frozen_parameters import freeze
from hf_memopt.training.techniques.technique_callback import ModelCallback


def still_embeddings(model):
    return freeze(model, "embeddings")


class StillEmbeddingsCallback(ModelCallback):
    technique = "still embeddings"

    def change_model(self, model, args):
        self.handle = self._handles.keep(model, still_embeddings(model))
'''
ENTRY = Technique(
    "still embeddings",
    "training",
    consent="still",
    on_model="toy_technique:still_embeddings",
    title="still",
    sets={"freeze": ("embeddings",)},
    why="embeddings have no gradient",
    refused={"NEFTune": ("its noise is for embeddings that are trained", "Leave neftune_noise_alpha out")},
)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the toy, whose entry is in the list."""
    (tmp_path / "toy_technique.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(TECHNIQUES, ENTRY.name, ENTRY)
    return importlib.import_module("toy_technique")


def trainer(folder: Path, **settings: Any) -> Any:
    args = tiny.arguments(folder, **settings)
    return Trainer(model=tiny.bert(), args=args, train_dataset=tiny.rows(4))


def test_attach_refuses_it_beside_what_its_entry_names(toy: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        attach(trainer(tmp_path, neftune_noise_alpha=5.0), toy.StillEmbeddingsCallback())
    refusal = "its noise is for embeddings that are trained; expected only one of them. Leave neftune_noise_alpha out"
    assert str(error.value) == f"still embeddings and NEFTune are incompatible: {refusal}"
    assert str(error.value) == str(refusal_of("NEFTune", "still embeddings"))


def test_the_estimate_of_a_trainer_does_to_the_model_what_it_does(toy: Any, tmp_path: Path) -> None:
    plain, changed = trainer(tmp_path), trainer(tmp_path)
    attach(changed, toy.StillEmbeddingsCallback())
    shape = BatchShape(2, 12, None, None)
    found, before = estimate_of(changed, shape), estimate_of(plain, shape)
    assert found.settings.prepare == (toy.still_embeddings,)
    assert before.settings.prepare == ()
    assert found.trainable_parameters < before.trainable_parameters
    changed.memopt_handle.remove()
    assert all(parameter.requires_grad for parameter in changed.model.parameters())


def test_a_plan_considers_it_and_asks_for_its_word(toy: Any) -> None:
    config, gpu = tiny.llama_config(vocab_size=4000), custom_gpu("2GiB", "8.6")
    asked = {"gpu": gpu, "effective_batch_size": 2, "seq_len": 16, "method": "full"}
    with pytest.raises(ValueError, match=r"'shorter', 'still'\. Did you mean 'still'\?$"):
        plan(config, allow="stil", **asked)
    assert plan(config, allow="still", **asked).allow == ("still",)
    found = [one for one in set_ups("full", ModelFacts("causal-lm", False, 2), gpu, 2) if "still" in one.consents]
    assert found
    assert all(one.recipe.freeze == ("embeddings",) and "still" in one.name.split(", ") for one in found)


def test_the_table_of_docs_has_it(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(hf_memopt.__file__).parent.parent / "benchmarks"))
    table = importlib.import_module("table_of_code").compatibility()
    assert "\n| still embeddings | " in table
    assert "its noise is for embeddings that are trained" in table
