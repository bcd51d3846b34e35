"""Set-ups that share a model within a comparison are estimated as each of them alone."""

from __future__ import annotations

from typing import Any

import pytest

from hf_memopt.prediction.memory import estimate
from hf_memopt.prediction.memory.models import loading
from hf_memopt.prediction.memory.recording import keeping_models
from hf_memopt.prediction.memory.recording import sessions as sessions
from hf_memopt.prediction.memory.recording.sessions import Session
from hf_memopt.training.devices import find_gpu
from tests.memory.small_configs import CONFIGS

pytestmark = [
    # the deprecated name of activation checkpointing, asked for by peft; seen in peft 0.18 with transformers 5.23
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
]
GPU = find_gpu("RTX 3060 12GB")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of models that were built since; nothing was recorded before."""
    Session.traces.clear()
    seen: list[Any] = []

    def counting(model: Any, **options: Any) -> Any:
        seen.append(model)
        return loading.load_model(model, **options)

    monkeypatch.setattr(sessions, "load_model", counting)
    return seen


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in": "int8", "lora": 4},
        *(pytest.param(settings, marks=pytest.mark.slow) for settings in ({"lora": 4, "checkpointing": True}, {})),
    ],
)
def test_a_recording_leaves_nothing_in_a_kept_model(settings: dict[str, Any], loads: list[Any]) -> None:
    """An 8-bit layer of bitsandbytes casts its bias when it runs first, which is an allocation of the first step."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    config, found = CONFIGS["bert"](), []
    with keeping_models():
        for _ in range(3):
            Session.traces.clear()
            found.append(estimate(config, batch_size=2, seq_len=16, gpu=GPU, precision="bf16", **settings).to_json())
    assert len(set(found)) == 1
    assert len(loads) <= 2  # one that stays as it is, one that is prepared


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", {}),
        *(
            pytest.param(name, settings, marks=pytest.mark.slow)
            for name in ("bert", "llama", "t5", "gpt2")
            for settings in ({"lora": 4}, {"lora": 4, "load_in": "nf4"}, {"freeze": ("embeddings",)})
        ),
    ],
)
def test_set_ups_with_and_without_checkpointing_share_a_model(
    name: str, settings: dict[str, Any], loads: list[Any]
) -> None:
    """Checkpointing is switched on around each recording, and leaves nothing in the model."""
    if "lora" in settings:
        pytest.importorskip("peft")
        pytest.importorskip("bitsandbytes")
    config = CONFIGS[name]()

    def found(checkpointing: Any) -> str:
        Session.traces.clear()
        sizes = {"batch_size": 2, "seq_len": 16, "gradient_accumulation_steps": 2}
        return estimate(config, **sizes, gpu=GPU, precision="bf16", checkpointing=checkpointing, **settings).to_json()

    ways = [False, True, {"every_n_layers": 2}, False]
    alone = [found(way) for way in ways[:3]]
    loads.clear()
    with keeping_models():
        together = [found(way) for way in ways]
    assert together == [*alone, alone[0]]
    assert len(loads) <= 2  # one that stays as it is, one that is prepared
