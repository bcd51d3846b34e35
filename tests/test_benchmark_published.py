"""The benchmark of published measurements: its two formats, its table of behaviours, its errors and README's table."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tiny
from hf_memopt.memory.optimizers.optimizer_memory import ParameterFacts, parameter_facts

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "benchmarks" / "published"


@pytest.fixture(scope="module")
def published() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("published")


@pytest.fixture(scope="module")
def cases(published: ModuleType) -> ModuleType:
    return importlib.import_module("published_cases")


@pytest.fixture(scope="module")
def behaviours(published: ModuleType) -> ModuleType:
    return importlib.import_module("published_behaviours")


@pytest.fixture(scope="module")
def changes(published: ModuleType) -> ModuleType:
    return importlib.import_module("published_changes")


def measurement(**changed: Any) -> dict[str, Any]:
    """Return a row of a small run; ``configuration`` is merged."""
    configuration = {
        "model": "distilgpt2",
        "task": "text-generation",
        "loop": "Trainer",
        "precision": "fp32",
        "optim": "adamw_torch",
        "batch_size": 1,
        "seq_len": 8,
        **changed.pop("configuration", {}),
    }
    row = {
        "id": "row",
        "source": "github:owner/name file.csv",
        "card": "RTX 3060 12GB",
        "versions": "torch 2.6.0, transformers 4.51.3",
        "what": "allocated",
        "measured_bytes": 10**9,
        "configuration": configuration,
    }
    return {**row, **changed}


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


# ---- The loader


def test_the_given_files_are_read(cases: ModuleType) -> None:
    found = cases.read_cases([PUBLISHED / "measurements.json", PUBLISHED / "a100_throughput.json"])
    assert len(found) == 18 + 47
    compared = [case for case in found if not case.excluded]
    assert {case.loop for case in compared} == {"Trainer", "SFTTrainer", "manual"}
    assert compared == found
    assert [case.gpus for case in found].count(2) == 25
    assert all(case.measured_bytes > 10**9 and case.source for case in compared)
    for case in compared:
        if case.quantization != "gptq":
            assert cases.configuration_of(case)


def test_a_row_of_the_harness(cases: ModuleType) -> None:
    found = {case.id: case for case in cases.read_cases([PUBLISHED / "a100_throughput.json"])}
    case = found["mistralai/Mistral-7B-v0.1 baseline-peft-bnb lora 8 x 1"]
    assert case.versions == {
        "torch": (2, 4),
        "transformers": (4, 48),
        "trl": (0, 13),
        "peft": (0, 13),
        "flash-attn": (2, 7),
    }
    assert (case.gpu, case.quantization, case.kbit_preparation, case.loop) == ("A100 80GB", "nf4", "peft", "SFTTrainer")
    assert case.settings["batch_size"] == 8
    assert case.settings["precision"] == "bf16"
    assert case.lora["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (case.nvml_bytes, case.tokens_per_second) == (46050 * 2**20, 2987.456)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch 2.4.1, transformers 4.48.1", {"torch": (2, 4), "transformers": (4, 48)}),
        ("Jan 2022: torch ~1.10, transformers 4.4x", {"torch": (1, 10), "transformers": (4, 40)}),
        ("torch 2.3-2.4", {"torch": (2, 3)}),
        ("", {}),
    ],
)
def test_versions(cases: ModuleType, text: str, expected: dict[str, Any]) -> None:
    assert cases.versions_of(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pure bf16 weights, no autocast", ("fp32", "bfloat16")),
        ("bf16 autocast", ("bf16", "float32")),
        ("fp16", ("fp16", "float32")),
        ("fp32", ("fp32", "float32")),
    ],
)
def test_precisions(cases: ModuleType, tmp_path: Path, text: str, expected: tuple[str, str]) -> None:
    path = written(tmp_path / "rows.json", [measurement(configuration={"precision": text})])
    (case,) = cases.read_cases([path])
    assert (case.settings["precision"], case.settings["weights_dtype"]) == expected


def test_a_measurement_that_two_files_have_counts_once(cases: ModuleType, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.json", [measurement(), measurement(id="again"), measurement(measured_bytes=5)])
    assert [case.id for case in cases.read_cases([path, path])] == ["row", "again", "row"]


def test_a_file_of_another_format(cases: ModuleType, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.json", {"no": "rows"})
    with pytest.raises(ValueError, match=r"has neither format of benchmarks/published; expected a list of measurem"):
        cases.read_cases([path])


def test_every_model_has_a_source_and_a_configuration_that_can_be_built(cases: ModuleType) -> None:
    from transformers import AutoConfig

    for name, facts in json.loads((PUBLISHED / "models.json").read_text(encoding="utf-8")).items():
        found = cases.model_facts(name)
        assert found["source"].startswith("https://"), name
        AutoConfig.for_model(found["model_type"], **found["config"])
        for other in facts["other_names"]:
            assert cases.model_facts(other) == found


# ---- Behaviours


def names(behaviours: ModuleType, cases: ModuleType, tmp_path: Path, model_type: str, **row: Any) -> list[str]:
    (case,) = cases.read_cases([written(tmp_path / "rows.json", [measurement(**row)])])
    return [behaviour.name for behaviour in behaviours.behaviours_of(case, model_type)]


def test_behaviours_follow_versions_loop_and_family(behaviours: ModuleType, cases: ModuleType, tmp_path: Path) -> None:
    of = lambda model_type, **row: names(behaviours, cases, tmp_path, model_type, **row)  # noqa: E731
    assert of("gpt2") == []
    assert of("gpt2", versions="torch 2.13, transformers 5.23.0", configuration={"loop": "hand-written"}) == []
    assert of("gpt2", configuration={"loop": "hand-written"}) == [
        "the key-value cache keeps keys and values without a copy"
    ]
    assert of("llama", versions="transformers 4.48.1") == [
        "the loss casts the logits to float32 and copies their shifted part"
    ]
    assert len(of("llama", versions="transformers 4.45.2")) == 2
    assert of("gpt2", versions="transformers 4.48.1") == ["the loss copies the shifted logits in their own dtype"]
    old = of("bert", versions="torch ~1.10, transformers ~4.15", configuration={"attention": "eager"})
    assert old == [
        "softmax keeps its input",
        "zero_grad keeps the gradients",
        "the Trainer's AdamW is transformers' own, a loop with one temporary",
    ]
    rocm = of("bert", versions="torch 2.3, transformers 4.50", source="github:owner/rocm-runs file.csv")
    assert rocm == ["cuBLAS has no workspace in torch's allocator on ROCm"]


def test_every_behaviour_has_a_source_and_versions(behaviours: ModuleType) -> None:
    for behaviour in behaviours.BEHAVIOURS:
        assert behaviour.source.startswith("github:"), behaviour.name
        assert set(behaviour.loops) <= set(behaviours.LOOPS)
    found = [behaviour.name for behaviour in behaviours.BEHAVIOURS]
    assert len(set(found)) == len(found)


def test_old_softmax_and_losses_compute_the_same(changes: ModuleType) -> None:
    scores = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    old, new = changes.softmax_that_keeps_its_input(scores), F.softmax(scores, dim=-1)
    weights = torch.randn_like(old)
    assert torch.equal(old, new)
    gradients = [torch.autograd.grad((result * weights).sum(), scores)[0] for result in (old, new)]
    torch.testing.assert_close(*gradients)
    model, ids = tiny.llama(), torch.arange(24).view(2, 12)
    expected = model(input_ids=ids, labels=ids).loss
    for change in (changes.upcast_logits, changes.upcast_and_copy_in_loss, changes.cache_without_copy):
        change(model)
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


@pytest.mark.parametrize("shapes", [[(7, 5), (9,)], [(64, 32), (64,), (32, 64)]])
def test_adafactor_of_torch_has_the_state_of_the_class(changes: ModuleType, shapes: list[tuple[int, ...]]) -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in shapes])
    optimizer = torch.optim.Adafactor(model.parameters())
    sum(parameter.square().sum() for parameter in model).backward()
    optimizer.step()
    state = [
        value.nbytes
        for of_parameter in optimizer.state.values()
        for name, value in of_parameter.items()
        if name != "step" and value is not None
    ]
    assert sorted(changes.adafactor_of_torch(parameter_facts(model)).state) == sorted(state)


def test_loops_over_parameters_hold_one_temporary_or_two(changes: ModuleType) -> None:
    facts = [ParameterFacts(str(size), (size,), 4, is_embedding=False) for size in (3, 5)]
    one, two = changes.adamw_of_transformers(facts), changes.adamw_in_a_loop(facts)
    assert one.step == ((12,), (12, 20))
    assert two.step == ((12, 12), (12, 20, 20))
    assert one.state == two.state == (12, 12, 20, 20)


# ---- The run


def test_a_run_prints_each_case_and_counts_what_can_be_compared(
    published: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        measurement(),
        measurement(id="by hand", configuration={"loop": "hand-written"}, measured_bytes=2 * 10**9),
        measurement(id="unheard-of", configuration={"model": "nobody/unheard-of"}, measured_bytes=3),
        measurement(id="broken", configuration={"batch_size": None}, measured_bytes=4),
        {"id": "no configuration", "source": "here", "what": "allocated"},
    ]
    assert published.main(["--cases", str(written(tmp_path / "rows.json", rows))]) == 0
    printed = capsys.readouterr().out
    assert "github:owner/name file.csv" in printed
    assert "RTX 3060 12GB; torch 2.6, transformers 4.51" in printed
    (first,) = (line for line in printed.splitlines() if line.startswith("row "))
    assert "954" in first  # measured, in MiB
    assert re.search(r"all, matched +2 ", printed)
    assert "model='nobody/unheard-of' is in neither list of configurations" in printed
    assert "not counted: 1, it cannot be read" in printed


def test_a_row_compares_what_was_measured(published: ModuleType, cases: ModuleType, tmp_path: Path) -> None:
    rows = [
        measurement(what="reserved", measured_bytes=1),
        measurement(what="NVML whole card", measured_bytes=2, own_context_mib=1000),
        measurement(what="NVML less first sample", measured_bytes=3),
        measurement(nvidia_smi_delta_mib=900, measured_bytes=4),
    ]
    found = [published.compare(case) for case in cases.read_cases([written(tmp_path / "rows.json", rows)])]
    reserved, whole, sampled, allocated = (row.as_is_bytes for row in found)
    assert reserved == sampled
    assert whole == reserved + 1000 * 2**20
    assert allocated <= reserved
    assert [row.nvml is None for row in found] == [True, True, True, False]
    assert found[0].is_today


TWO_GPUS = {
    "bigcode/gpt_bigcode-santacoder none full 4 x 2": 0.01,
    "mistralai/Mistral-7B-v0.1 none full 2 x 2": 0.01,
    "mistralai/Mistral-7B-v0.1 none lora 2 x 2": 0.03,
    "mistralai/Mistral-7B-v0.1 baseline-peft-bnb lora 2 x 2": 0.1,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked for by peft
@pytest.mark.parametrize("name", TWO_GPUS)
def test_a_rank_of_two_gpus_with_the_fsdp_of_its_versions(
    published: ModuleType, cases: ModuleType, behaviours: ModuleType, name: str
) -> None:
    case = next(case for case in cases.read_cases([PUBLISHED / "a100_throughput.json"]) if case.id == name)
    settings = published.estimate_settings(case)
    for behaviour in behaviours.behaviours_of(case, settings["model"].model_type):
        behaviour.change(settings)
    found = published.estimate(**settings)
    assert found.peak_allocated_bytes == pytest.approx(case.measured_bytes, rel=TWO_GPUS[name])


def test_summaries(published: ModuleType) -> None:
    assert published.summary([]) == {"cases": 0}
    assert published.summary([0.01, -0.03, 0.02]) == {"cases": 3, "median": 0.02, "worst": 0.03, "worst_under": 0.03}
    assert published.summary([0.01])["worst_under"] == 0


def test_readmes_table() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        table: ModuleType = importlib.import_module("published_table")
    row = {
        "source": "github:owner/name some/file.csv: A100",
        "loop": "manual",
        "gpu": "A100",
        "what": "NVML whole card",
        "measured_bytes": 100,
        "as_is_bytes": 90,
        "matched_bytes": 101,
        "behaviours": ["an old behaviour"],
    }
    summary = {"cases": 2, "median": 0.01, "worst": 0.02, "worst_under": 0.0}
    figures = {
        "rows": [row, {**row, "matched_bytes": 98}],
        "summaries": {"all": summary, "none": {"cases": 0}},
        "left_out": {"2 GPUs": 3},
    }
    lines = table.published_table(figures).splitlines()
    link = "[owner/name](https://github.com/owner/name)"
    assert lines[2] == (
        f"| {link} | A100 | hand-written loop | NVML whole GPU | 2 | 10.00 | 10.00 | 1.50 | 2.00 | 2.00 |"
    )
    assert "| all | 2 | 1.00 | 2.00 | 0.00 |" in lines
    assert "| none | 0 | - | - | - |" in lines
    assert "an old behaviour (2)" in lines[-1]
    assert "Not compared: 3: 2 GPUs." in lines[-1]
