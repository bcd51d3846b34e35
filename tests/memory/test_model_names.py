"""What may name a model for ``estimate``: names, ids on the hub and folders, and what is said of those that may not."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
import transformers
from huggingface_hub import errors
from tables import tables

import tiny
from hf_memopt import Estimate, estimate, hub, plan, read_rows, recipe

TABLES = tables(__file__)

EXPECTED_NAMES = "expected a folder with config.json, an id on the hub or a well-known name"
LIST = "List the well-known names: hf-memopt estimate --list-models"


def of(model: Any, **settings: Any) -> Estimate:
    return estimate(model, **{"batch_size": 1, "seq_len": 8, "gpu": "RTX 3090", **settings})


def refused(model: Any, **settings: Any) -> str:
    with pytest.raises(ValueError) as error:
        of(model, **settings)
    return str(error.value)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Fail every download with the error that the test puts into the list."""
    failures: list[Exception] = []

    def download(*_: Any, **__: Any) -> str:
        raise failures[0]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return failures


def test_the_hubs_names_are_understood_wherever_a_task_is_asked_for() -> None:
    config, rows = tiny.bert_config(), datasets.Dataset.from_list([{"text": "w1", "label": at % 2} for at in range(8)])
    assert of(config, task="fill-mask").model == "BertForMaskedLM"
    settings = {"gpu": "1GB", "seq_len": 8, "effective_batch_size": 1, "method": "full"}
    assert plan(config, task="fill-mask", **settings).task == "masked-lm"
    options = recipe("4gb-gpu").replace(lora=8, load_in="nf4")
    asked = [
        options.model_kwargs(task=task)["quantization_config"].to_dict() for task in ("ner", "token-classification")
    ]
    assert asked[0] == asked[1]
    read = [read_rows(rows, tiny.tokenizer(), task) for task in ("text-classification", "sequence-classification")]
    assert (read[0].head, read[0].train[:]) == (read[1].head, read[1].train[:])
    with pytest.raises(ValueError, match=r"^task='image-segmentation' is unknown; expected one of 'causal-lm', "):
        read_rows(rows, tiny.tokenizer(), "image-segmentation")


def test_a_known_name_never_touches_the_network(unreachable: list[Exception]) -> None:
    unreachable.append(AssertionError("a known name must not touch the network"))
    for name, known in (("openai-community/GPT2", "gpt2"), ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M")):
        assert of(name).model == known


@pytest.mark.slow
def test_notes_of_published_weights_and_of_kernels_that_are_not_simulated() -> None:
    published = (
        "its published weights are MXFP4, 4 bits each, which transformers runs but does not train "
        "(Mxfp4HfQuantizer.is_trainable): the figures are those of weights dequantised to bf16"
    )
    assert [published in of(name, lora=4).notes for name in ("openai/gpt-oss-20b", "gpt2")] == [True, False]
    own_code = (
        "layers with a recurrent state are simulated by transformers' own code; with the kernels of mamba_ssm or "
        "fla (flash-linear-attention) a step keeps other tensors and takes other times"
    )
    mamba = transformers.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, state_size=4)
    assert [own_code in of(config).notes for config in (mamba, tiny.llama_config())] == [True, False]


@pytest.mark.parametrize(
    ("processor", "pictures"),
    [
        ({"size": {"shortest_edge": 32}, "crop_size": {"height": 24, "width": 16}}, "24 x 16"),
        ({"size": {"height": 24, "width": 16}, "crop_size": 32, "do_center_crop": False}, "24 x 16"),
        ({"size": {"shortest_edge": 24}}, "24 x 24"),
        ({"size": {"shortest_edge": 24, "longest_edge": 40}}, "24 x 40"),  # the largest that a detector is given
        ({"size": 24}, "24 x 24"),
        ({"feature_size": 80}, "32 x 32"),  # of audio
        ({"size": {"shortest_edge": 24, "longest_edge": None}}, "24 x 24"),
        ({"size": [24]}, "32 x 32"),
        ({"size": {"shortest_edge": 3136, "longest_edge": 12845056}}, "32 x 32"),  # areas
        ([], "32 x 32"),
    ],
)
def test_pictures_of_a_folder_have_the_size_that_its_processor_gives_them(processor, pictures, tmp_path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.Dinov2Config(
        **sizes, image_size=32, patch_size=8, architectures=["Dinov2ForImageClassification"]
    ).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert f"pictures of {pictures} pixels (image_size)" in of(tmp_path, seq_len=None).notes


RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(("model", "failure", "told", "hint"), TABLES["unknown names"])
def test_an_unknown_name_tells_why_and_what_is_nearest(
    unreachable: list[Exception], model: str, failure: str, told: str, hint: str
) -> None:
    kind = getattr(errors, failure)  # the hub's answer
    unreachable.append(kind("no", **{"response": RESPONSE} if issubclass(kind, errors.HfHubHTTPError) else {}))
    assert (
        refused(model)
        == f"model={model!r} is neither a well-known name nor a folder, {told}; {EXPECTED_NAMES}.{hint} {LIST}"
    )


@pytest.fixture
def hub_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the process ask a hub, at an address and behind proxies that the test gives."""

    def set_up(connect: Any, endpoint: str = "https://hub.example", proxies: Any = None) -> None:
        monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(socket, "create_connection", connect)
        monkeypatch.setattr(hub, "getproxies", lambda: proxies or {})

    return set_up


def test_hub_that_cannot_be_reached_is_asked_once_and_told(hub_that_is_asked: Any) -> None:
    asked: list[Any] = []

    def refuse(address: Any, timeout: float) -> Any:
        asked.append((*address, timeout))
        raise ConnectionRefusedError

    hub_that_is_asked(refuse)
    text = refused("someone/zzzz")  # with the real client of the hub, which looks at its cache only
    assert asked == [("hub.example", 443, 3.0)]
    assert text == (
        "model='someone/zzzz' is neither a well-known name nor a folder, and the hub is unreachable and its local "
        f"cache has nothing of that name; {EXPECTED_NAMES}. {LIST}"
    )


@pytest.mark.parametrize(
    ("endpoint", "proxies", "connected"),
    [
        ("https://hub.example", {}, [("hub.example", 443)]),
        ("http://127.0.0.1:8080/hub", {}, [("127.0.0.1", 8080)]),
        ("https://hub.example", {"https": "http://proxy.example:3128"}, []),
    ],
)
def test_hub_that_answers_or_stands_behind_a_proxy_is_asked(
    tmp_path: Any, monkeypatch: Any, hub_that_is_asked: Any, endpoint: str, proxies: dict[str, str], connected: Any
) -> None:
    tiny.bert_config(architectures=["BertForTokenClassification"]).save_pretrained(tmp_path)
    asked: list[Any] = []
    addresses: list[Any] = []

    def connect(address: Any, timeout: float) -> Any:
        addresses.append(address)
        return nullcontext()

    def download(repository: str, file: str, *, local_files_only: bool) -> str:
        asked.append((repository, file, local_files_only))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert of("someone/gpt2").model == "someone/gpt2"  # a well-known name of another organisation is another model
    assert asked == [("someone/gpt2", "config.json", True)]  # offline
    hub_that_is_asked(connect, endpoint, proxies)
    assert of("someone/gpt2").parameters == of(tiny.bert_config(), task="token-classification").parameters
    assert (addresses, asked[1]) == (connected, ("someone/gpt2", "config.json", False))


def test_a_hub_that_never_answers_costs_the_patience_once(monkeypatch: Any, hub_that_is_asked: Any) -> None:
    """A name server and every address may each wait for a timeout of their own; together they get the patience."""
    released = threading.Event()

    def wait(address: Any, timeout: float) -> Any:
        released.wait(30)
        return nullcontext()

    hub_that_is_asked(wait)
    monkeypatch.setattr(hub, "_PATIENCE_SECONDS", 0.05)
    started = time.monotonic()
    assert not hub.hub_answers()
    assert time.monotonic() - started < 10
    released.set()


NOT_UNDERSTOOD = f"has a config.json that transformers {transformers.__version__} does not understand"
EXPECTED_CONFIG = "expected a configuration that transformers can build. Correct it, or pass the module"


def test_folder_without_config_is_refused(tmp_path: Any) -> None:
    assert refused(str(tmp_path)) == (
        f"model={str(tmp_path)!r} is a folder without config.json; expected one that save_pretrained has written. "
        "Pass the folder of a model"
    )


def test_what_cannot_name_a_model_is_refused(tmp_path: Any) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    missing, weights = str(tmp_path / "bret"), str(tmp_path / "m.gguf")
    assert refused(missing) == (
        f"model={missing!r} does not exist; expected a folder with config.json, as save_pretrained writes it. "
        "Did you mean 'bert'? Check the path"
    )
    assert refused(weights) == (
        f"model={weights!r} is a file of weights; expected a model. GGUF files are for llama.cpp, and the Trainer does "
        "not train them. Pass the original: model='m'."
    )


def folder_of(folder: Any, content: str | bytes | None = None, **changed: Any) -> str:
    """Write a config.json that somebody else might have written; return its folder."""
    if content is None:
        content = json.dumps({**tiny.bert_config().to_dict(), **changed})
    (folder / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    return str(folder)


@pytest.mark.parametrize(("changed", "message"), TABLES["foreign configurations"])
def test_foreign_configuration_that_breaks_transformers_is_one_error(
    tmp_path: Any, changed: dict[str, Any], message: str
) -> None:
    folder = folder_of(tmp_path, **changed)
    name = folder if "NOT UNDERSTOOD" in message else tmp_path.name
    told = message.replace("NOT UNDERSTOOD", NOT_UNDERSTOOD)
    assert refused(folder) == f"model={name!r} {told}; {EXPECTED_CONFIG}"


@pytest.mark.parametrize(
    "content",
    [
        *('{"model_type": "none-such"}', '{"model_type": ["bert"]}', '{"model_type": "bert", "hidden_size": 1e999}'),
        '{"model_type": "bert", "num_attention_heads": null}',
        '{"model_type": "bert", "hidden_size": %s}' % ("9" * 5000),
        *('{"model_type": "bert", "id2label": 3}', '{"model_type": "bert", "dtype": "none-such"}'),
        '{"model_type": "bert", "quantization_config": "4bit"}',
        '{"model_type": "bert", "x": %s}' % ("[" * 100_000 + "]" * 100_000),
        '{"model_type": "bert", "x": %s}' % ("[" * 900 + "]" * 900),
        *('{"model_type": "bert"', "", "[1, 2]", "null", '"bert"', bytes(range(256))),
        '{"model_type": "bert"}'.encode("utf-16"),
    ],
    ids=lambda content: repr(content)[:50],
)
def test_config_that_transformers_does_not_understand_is_refused(tmp_path: Any, content: str | bytes) -> None:
    folder = folder_of(tmp_path, content)
    text = refused(folder)
    assert text.startswith(f"model={folder!r} {NOT_UNDERSTOOD} (")
    assert text.endswith(f"); {EXPECTED_CONFIG}")
    assert "\n" not in text


@pytest.mark.parametrize("auto_map", ["AutoConfig", "AutoModelForCausalLM"])
def test_code_of_a_folder_is_never_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, auto_map: str) -> None:
    """Nothing is asked, whatever would be answered; a known model type is built without the folder's code."""
    own = {"model_type": "own"} if auto_map == "AutoConfig" else {}
    folder = folder_of(tmp_path, **own, auto_map={auto_map: "code.Own"}, architectures=None)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    if own:
        assert refused(folder) == (
            f"model={folder!r} {NOT_UNDERSTOOD} without Python code of its own, and no such code is run; expected a "
            "model type of transformers. Load it yourself in Python and pass the module"
        )
    else:
        assert of(folder, task="causal-lm").parameters > 0
    assert not (tmp_path / "ran").exists()
