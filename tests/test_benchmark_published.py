"""The benchmark of published measurements: its files, its table of behaviours, its errors and README's table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import published
import published_behaviours as behaviours
import published_cases as cases
import published_changes as changes
import pytest
import torch
import torch.nn.functional as F
from tables import tables

import tiny
from hf_memopt.memory.optimizers import ParameterFacts

TABLES = tables(__file__)


def measurement(**changed: Any) -> dict[str, Any]:
    """Return a source with one small run; ``settings`` are merged."""
    settings = {"precision": "fp32", "optim": "adamw_torch", "batch_size": 1, "seq_len": 8}
    return {
        "source": "github:owner/name file.csv",
        "gpu": "RTX 3060 12GB",
        "versions": {"torch": "2.6", "transformers": "4.51"},
        "loop": "Trainer",
        "what": "allocated",
        "model": "gpt2",
        "settings": settings,
        "rows": [{"id": "row", "measured_bytes": 10**9}],
        **changed,
    }


def written(path: Path, *sources: dict[str, Any]) -> Path:
    path.write_text(json.dumps(sources), encoding="utf-8")
    return path


# ---- The files


def test_the_given_files_are_read() -> None:
    found = cases.read_cases(*cases.FILES)
    assert len(found) == 18 + 47 + 128
    assert {case.loop for case in found} == {"Trainer", "SFTTrainer", "manual", "function"}
    assert [case.gpus for case in found].count(2) == 25 + 4
    assert all((case.measured_bytes or 10**10) > 10**9 and case.source for case in found)
    assert all(case.measured_bytes or case.step_seconds or case.fits is not None for case in found)
    for case in found:
        if case.quantization in (None, "nf4"):
            assert cases.configuration_of(case)


UNKNOWN = TABLES["unknown"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_key_or_value_is_an_error(name: str, tmp_path: Path) -> None:
    changed, message = UNKNOWN[name]
    source = measurement(rows=[{"id": "the row", "measured_bytes": 10**9, **changed}])
    with pytest.raises(ValueError, match=re.escape(f"the row: {message}")):
        cases.read_cases(written(tmp_path / "rows.json", source))


def test_a_row_has_what_its_source_says_of_all() -> None:
    found = {case.id: case for case in cases.read_cases(cases.PUBLISHED / "a100_throughput.json")}
    case = found["mistralai/Mistral-7B-v0.1 baseline-peft-bnb lora 8 x 1"]
    assert case.versions == {"torch": "2.4", "transformers": "4.48", "trl": "0.13", "peft": "0.13", "flash-attn": "2.7"}
    assert (case.version("torch"), case.version("bitsandbytes")) == ((2, 4), None)
    assert (case.gpu, case.quantization, case.kbit_preparation, case.loop) == ("A100 80GB", "nf4", True, "SFTTrainer")
    assert (case.settings["batch_size"], case.settings["precision"]) == (8, "bf16")
    assert case.lora["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (case.nvml_bytes, case.tokens_per_second) == (46050 * 2**20, 2987.456)


def test_every_model_has_a_source_and_a_configuration_that_can_be_built() -> None:
    from transformers import AutoConfig

    for name, facts in json.loads((cases.PUBLISHED / "models.json").read_text(encoding="utf-8")).items():
        found = cases.model_facts(name)
        assert found["source"].startswith("https://"), name
        AutoConfig.for_model(found["model_type"], **found["config"])
        for other in facts["other_names"]:
            assert cases.model_facts(other) == found


# ---- Behaviours


def test_behaviours_follow_versions_loop_and_family(tmp_path: Path) -> None:
    def of(model_type: str, **changed: Any) -> list[str]:
        (case,) = cases.read_cases(written(tmp_path / "rows.json", measurement(**changed)))
        return [behaviour.name for behaviour in behaviours.behaviours_of(case, model_type)]

    assert of("gpt2") == []
    assert of("gpt2", versions={"torch": "2.13", "transformers": "5.23"}, loop="manual") == []
    assert of("gpt2", loop="manual") == ["the key-value cache keeps keys and values without a copy"]
    assert of("llama", versions={"transformers": "4.48"}) == [
        "the loss casts the logits to float32 and copies their shifted part"
    ]
    assert of("gpt2", versions={"transformers": "4.48"}) == ["the loss copies the shifted logits in their own dtype"]
    eager = {**measurement()["settings"], "attn_implementation": "eager"}
    assert of("bert", versions={"torch": "1.10", "transformers": "4.15"}, settings=eager) == [
        "softmax keeps its input",
        "zero_grad keeps the gradients",
        "the Trainer's AdamW is transformers' own, a loop with one temporary",
    ]


def test_every_behaviour_is_that_of_a_published_run() -> None:
    found = {
        behaviour.name
        for case in cases.read_cases(*cases.FILES)
        if case.quantization in (None, "nf4")
        for behaviour in behaviours.behaviours_of(case, cases.configuration_of(case)[0].model_type)
    }
    assert found == {behaviour.name for behaviour in behaviours.BEHAVIOURS}


def test_every_behaviour_has_a_source_and_versions() -> None:
    for behaviour in behaviours.BEHAVIOURS:
        assert behaviour.source.startswith("github:"), behaviour.name
        assert set(behaviour.loops) <= set(behaviours.LOOPS)
    found = [behaviour.name for behaviour in behaviours.BEHAVIOURS]
    assert len(set(found)) == len(found)


def test_old_softmax_and_losses_compute_the_same() -> None:
    scores = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    old, new = changes.softmax_that_keeps_its_input(scores), F.softmax(scores, dim=-1)
    weights = torch.randn_like(old)
    assert torch.equal(old, new)
    gradients = [torch.autograd.grad((result * weights).sum(), scores)[0] for result in (old, new)]
    torch.testing.assert_close(*gradients)
    model, ids = tiny.llama(), torch.arange(24).view(2, 12)
    expected = model(input_ids=ids, labels=ids).loss
    for change in (changes.upcast_and_copy_in_loss, changes.cache_without_copy):
        change(model)
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_a_loop_over_parameters_holds_one_temporary() -> None:
    facts = [ParameterFacts(str(size), (size,), 4, is_embedding=False) for size in (3, 5)]
    found = changes.adamw_of_transformers(facts)
    assert found.step == ((12,), (12, 20))
    assert found.state == (12, 12, 20, 20)


# ---- The run


def test_a_run_prints_each_case_and_counts_what_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [
        measurement(),
        measurement(loop="manual", rows=[{"id": "by hand", "measured_bytes": 2 * 10**9}]),
        measurement(model="nobody/unheard-of"),
        measurement(quantization="gptq"),
    ]
    published.main(["--cases", str(written(tmp_path / "rows.json", *sources))])
    printed = capsys.readouterr().out
    assert [line.partition(": as is ")[0] for line in printed.splitlines()[:2]] == ["row", "by hand"]
    assert "| all, matched | 2 |" in printed
    assert "1: model='nobody/unheard-of' is in neither list of configurations" in printed
    assert "1: weights quantised by 'gptq' are not estimated" in printed


def test_a_row_compares_what_was_measured(tmp_path: Path) -> None:
    rows = [
        {"what": "reserved"},
        {"what": "NVML whole card", "context_bytes": 1000 * 2**20},
        {"what": "NVML less first sample"},
        {"nvml_bytes": 900 * 2**20},
    ]
    source = measurement(rows=[{"id": "row", "measured_bytes": 1, **row} for row in rows])
    found = [published.compare(case) for case in cases.read_cases(written(tmp_path / "rows.json", source))]
    reserved, whole, sampled, allocated = (row["as_is_bytes"] for row in found)
    assert reserved == sampled
    assert whole == reserved + 1000 * 2**20
    assert allocated <= reserved
    assert all(row["is_today"] for row in found)
    assert published.summaries(found)["reserved and the GPU's usual context, matched"]["cases"] == 1


def test_outcomes_are_counted_by_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": "ran", "what": "fits", "fits": True},
        {"id": "too large", "what": "fits", "fits": False, "settings": {"batch_size": 512, "seq_len": 512}},
        {"id": "unsure", "what": "fits", "fits": False, "solid": False},
        {"id": "seconds alone", "what": "seconds", "step_seconds": 1.0},
    ]
    published.main(["--cases", str(written(tmp_path / "rows.json", measurement(rows=rows)))])
    printed = capsys.readouterr().out
    assert "ran: ran, predicted fits (" in printed
    assert "unsure: ran out of memory, predicted fits (" in printed
    assert "seconds alone" not in printed
    table = [line for line in printed.splitlines() if line.startswith("| ran")]
    assert table == [
        "| ran | 1 | 1 | 0 | 0 |",
        "| ran out of memory | 1 | 0 | 0 | 1 |",
        "| ran out of memory, settings not fully stated | 1 | 1 | 0 | 0 |",
    ]


def test_the_margin_is_held_against_reserved_bytes() -> None:
    row = {"what": "reserved", "is_solid": True, "measured_bytes": 1000}
    rows = [{**row, "matched_bytes": found} for found in (1000, 951, 949)]
    others = [{**rows[2], "what": "allocated"}, {**rows[2], "is_solid": False}]
    assert published.beyond_margin([*rows, *others]) == (3, 1)


def test_rows_of_reserved_bytes_that_are_far_off_are_named_and_explained() -> None:
    row = {"what": "reserved", "measured_bytes": 100 * 2**20}
    rows = [{**row, "case": str(found), "matched_bytes": found * 2**20} for found in (100, 91, 107, 109)]
    assert published.far_off([*rows, {**rows[1], "what": "allocated"}]) == (
        "Reserved bytes are off by more than 8 % in `91` by -9.0 % (-9 MiB) and `109` by +9.0 % (+9 MiB)."
    )
    assert published.far_off(rows[:1]) == "Reserved bytes are off by more than 8 % in none."
    page = (Path(__file__).parents[1] / "docs/estimator.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("Reserved bytes are off")]
    assert line.split("`")[1::2] == [  # those whose causes follow
        "fitcheck/TinyLlama-1.1B/eager/nf4/r32/2x512/reserved",
        "fitcheck/SmolLM2-1.7B/eager/nf4/r32/1x2048/reserved",
    ]


def test_what_lies_outside_of_torch_is_that_of_the_smallest_run() -> None:
    shared = {"source": "one", "is_quantized": False}
    rows = [
        {**shared, "matched_reserved_bytes": 100, "nvml_bytes": 150},
        {**shared, "matched_reserved_bytes": 350, "nvml_bytes": 400},
        {**shared, "matched_reserved_bytes": 50, "nvml_bytes": 200, "is_quantized": True},
        {**shared, "matched_reserved_bytes": 50, "nvml_bytes": None},
    ]
    assert published.environment_errors(rows) == [0.0, -0.5]


def test_summaries() -> None:
    assert published.summary([]) == {"cases": 0}
    assert published.summary([0.01, -0.03, 0.02]) == {"cases": 3, "median": 0.02, "worst": 0.03, "worst_under": 0.03}
    assert published.summary([0.01])["worst_under"] == 0


def test_readmes_table() -> None:
    row = {
        "source": "github:owner/name some/file.csv: A100",
        "loop": "manual",
        "gpu": "A100",
        "what": "NVML whole card",
        "measured_bytes": 100,
        "as_is_bytes": 90,
        "matched_bytes": 101,
        "behaviours": ["an old behaviour"],
        "is_solid": True,
    }
    summary = {"cases": 2, "median": 0.01, "worst": 0.02, "worst_under": 0.0}
    figures = {
        "rows": [row, {**row, "matched_bytes": 98}, {**row, "is_solid": False}, {**row, "measured_bytes": None}],
        "verdicts": {"ran": {"fits": 1, "tight": 2, "over": 0}},
        "beyond_margin": (7, 1),
        "summaries": {"all": summary, "none": {"cases": 0}},
        "left_out": {"2 GPUs": 3},
    }
    lines = published.table(figures).splitlines()
    link = "[owner/name](https://github.com/owner/name)"
    assert lines[2] == (
        f"| {link} | A100 | hand-written loop | NVML whole GPU | 2 | 10.00 | 10.00 | 1.50 | 2.00 | 2.00 |"
    )
    assert "| all | 2 | 1.00 | 2.00 | 0.00 |" in lines
    assert "| ran | 3 | 1 | 2 | 0 |" in lines
    assert (
        "*Tight* leaves less than 5 % of the GPU: of 7 runs whose reserved bytes torch measured, 1 reserved so much "
        "more than was predicted."
    ) in lines
    assert "an old behaviour (2)" in lines[-3]
    assert "Not compared: 3: 2 GPUs." in lines[-3]
