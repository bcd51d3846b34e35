"""The HTML report of a run: what its JSON says, escaped, in a browser of any width; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hand_made_runs import finished_run, lost_run
from html_page import Page
from invoked import invoked
from printed_errors import in_one_line

from hf_memopt import plotting
from hf_memopt.prediction.reports.run import read_run, run_page

SECTIONS = {"next", "peak", "timeline", "padding", "micro", "changes", "sure", "environment"}


def page_of(told: dict[str, Any]) -> str:
    return run_page(read_run(json.dumps(told), "memopt_run.json"))


def test_it_says_what_the_run_says() -> None:
    page = page_of(finished_run())
    read = Page(page)
    assert read.open == []
    assert len(set(read.ids)) == len(read.ids)
    assert {one for one in read.ids if one.isalpha()} == SECTIONS  # others are within pictures
    assert [where for where in read.loaded if not where.startswith("#")] == ["data:,"]
    said = read.words
    assert "LlamaForCausalLM on NVIDIA GeForce RTX 4060 4 x 4 examples of up to 512 tokens Trained" in said
    assert "Peak memory 6.92 of 8.00 GiB" in said  # 6670 MiB reserved and 412 MiB of context
    assert "Predicted 6.98 of 7.71 GiB batch 4 x 512" in said
    assert "Steps 40 1 to 40" in said
    assert "Padding 26.7 % of 245,760 tokens" in said
    assert "In micro-batches 12 of 40 steps memory ran out once" in said
    assert "weights 2.30 GiB 2.30 GiB gradients 2.30 GiB 1.07 GiB" in said
    assert "forward + backward 6.22 GiB 6.30 GiB +1.3 %" in said
    assert "max_tokens None 1024 out of memory at step 3" in said
    assert "MicrobatchCallback(max_tokens=1024)" in said
    for part in ("gradients, activations and others: 2.75 GiB", "reserved, not in use: 300.0 MiB"):
        assert f"<title>measured, {part}</title>" in page


def test_what_a_run_logged_is_drawn_step_by_step() -> None:
    curve = {"step": [1, 2], "loss": [2.9, None], "seconds_per_step": [0.5, 0.25], "tokens_per_second": [0, 80]}
    page = page_of(finished_run(curve=curve))
    assert {one for one in Page(page).ids if one.isalpha()} == {*SECTIONS, "curves"}
    for said in ("loss, step 2: not finite", "seconds per step, step 1: 0.5", "tokens per second, step 2: 80"):
        assert f"<title>{said}</title>" in page
    page = page_of(finished_run(curve={**curve, "loss": [None, None], "tokens_per_second": [0, 0]}))
    assert "<title>seconds per step, step 1: 0.5</title>" in page
    assert "<title>loss" not in page
    assert "<title>tokens per second" not in page


def test_an_out_of_memory_says_what_was_alive_and_what_fits() -> None:
    read = Page(page_of(lost_run()))
    assert read.open == []
    assert {one for one in read.ids if one.isalpha()} == {*SECTIONS, "alive"}
    said = read.words
    assert "Memory ran out at step 3, backward with 4 rows of 512 tokens." in said
    assert "To find what fits: hf-memopt plan gpt2 --gpu 'RTX 4060' --seq-len 512 --effective-batch 16" in said
    assert "6.84 GiB in tensors, 7.23 GiB reserved by torch's allocator." in said
    assert "other tensors 4 x 512 x 128256 bfloat16 1 501.0 MiB" in said
    assert "32.0 MiB 30 960.0 MiB" in said
    assert "GPU 0 has a total capacity of 8.00 GiB" in said


def test_a_folder_makes_the_page_and_the_newest_process_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)  # which is quicker
    (tmp_path / "memopt_run.json").write_text(json.dumps(finished_run()))
    done = invoked("report", tmp_path)
    page = tmp_path / "memopt_run.html"
    assert (done.exit_code, done.output) == (0, f"Report: {page}\n")
    assert page.read_text(encoding="utf-8") == page_of(finished_run())
    assert invoked("report", tmp_path).exit_code == 0  # as the run itself may have written it
    again = invoked("report", tmp_path, "--output", page)
    assert again.exit_code == 2
    assert f"{page} exists already; expected a new file. Pass another name, or --force to replace it" in in_one_line(
        again.output
    )
    (tmp_path / "memopt_run-rank1.json").write_text(json.dumps(lost_run(process=1, processes=2)))
    assert invoked("report", tmp_path, "--output", tmp_path / "other.html").exit_code == 0
    assert "process 1 of 2" in Page((tmp_path / "other.html").read_text(encoding="utf-8")).words


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is a folder without memopt_run.json; expected the output folder of a run with a MemoryReportCallback."),
        (
            "{}",
            "is nothing to report (it has neither the field candidates of a plan nor micro_batching of a run)",
        ),
        (
            finished_run(format=3),
            "(it has format 3, written by hf-memopt 0.2.0); expected what this version of hf-memopt writes. Train",
        ),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "memopt_run.json").write_text(text)
    found = invoked("report", tmp_path)
    assert found.exit_code == 2
    assert says.rstrip(".") in in_one_line(found.output)
    assert list(tmp_path.glob("*.html")) == []


def test_the_page_ends_with_what_to_do_next() -> None:
    told = finished_run()
    told["batches"] |= {"padded_tokens": 1000, "tokens": 350, "largest_rows": 8}
    said = Page(page_of(told)).words
    assert "65.0 % of all tokens are padding; batch examples of like lengths: train_dataset=bucketed(" in said
    told["batches"] |= {"tokens": 990}
    told["micro_batching"] = None
    assert Page(page_of(told)).words.rstrip().endswith("Do next Nothing: little padding, and memory never ran out.")
