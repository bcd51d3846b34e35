"""The picture of a run and the section of its model card, on the fake GPU of ``test_report``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tables import refuses
from test_estimate_picture import texts
from test_report import EVALUATION, GIB, MIB, PASSES, STATE, WEIGHTS, gpu, make_trainer  # noqa: F401

from hf_memopt import MemoryReportCallback, attach, plotting
from hf_memopt.prediction.memory import estimate_of


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved; their files are written too."""
    pytest.importorskip("matplotlib")
    found: list[Any] = []
    save = plotting.save_picture
    monkeypatch.setattr(plotting, "save_picture", lambda figure, path, *_: (found.append(figure), save(figure, path)))
    monkeypatch.setattr("hf_memopt.prediction.memory.run.run_report.name_of", lambda device: "a GPU")
    return found


def test_a_run_is_drawn_beside_its_prediction(gpu, tmp_path, figures) -> None:  # noqa: F811
    callback = MemoryReportCallback(plot=tmp_path / "memory.png")
    trainer = attach(make_trainer(gpu, tmp_path, [callback], eval_strategy="epoch"))
    trainer.train()
    [figure] = figures
    above, below = figure.axes
    lines = {line.get_label(): line for line in above.lines}
    measured = lines["forward + backward, measured"]
    assert measured.get_xdata().tolist() == [1, 2, 3, 4]
    assert measured.get_ydata().tolist() == pytest.approx([(PASSES - STATE) / GIB, *[PASSES / GIB] * 3])
    assert lines["evaluation, measured"].get_xdata().tolist() == [4]
    shape = callback._record.largest
    assert (shape.rows, shape.seq_len) == (4, max(len(row["input_ids"]) for row in trainer.train_dataset))
    found = {name: sizes.allocated_bytes for name, sizes in estimate_of(trainer, shape).phases.items()}
    expected = [found["load"], max(found["forward"], found["backward"]), found["optimizer"], found["evaluation"]]
    for phase, size in zip(("forward_backward", "optimizer", "evaluation"), expected[1:], strict=True):
        assert lines[f"{phase.replace('_', ' + ')}, predicted"].get_ydata()[0] == pytest.approx(size / GIB)
    sizes = [bar.get_width() * GIB for bar in below.patches]
    assert sizes[0::2] == pytest.approx([sizes["peak_allocated_bytes"] for sizes in callback.summary.values()])
    assert sizes[1::2] == pytest.approx(expected)
    [title] = [text for text in texts(figure) if "at the peak, measured" in text]
    assert title.startswith("BertForSequenceClassification on a GPU: 1.86 GiB at the peak, measured; ")
    assert f"for the largest batch, 4 x {shape.seq_len}" in title.replace("\n", " ")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_fails_leaves_the_training_whole(tmp_path, figures, monkeypatch, caplog) -> None:
    def full(*_: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr("hf_memopt.prediction.reports.run.RunPicture.write", full)
    trainer = attach(make_trainer(None, tmp_path, [MemoryReportCallback(plot=tmp_path / "memory.png")]))
    with caplog.at_level(logging.WARNING):
        assert trainer.train().global_step == 4
    [record] = [record for record in caplog.records if "was not drawn" in record.message]
    assert record.message.endswith("was not drawn (ValueError: no room); the training is whole")


def test_a_path_for_no_picture_is_refused_at_once(tmp_path) -> None:
    said = "is not a kind of picture; expected a name that ends in .png, .svg or .pdf. Pass memory.png"
    path = tmp_path / "memory.txt"
    refuses(ValueError, f"plot={str(path)!r} {said}", MemoryReportCallback, plot=path)


def test_no_peak_of_a_long_run_is_lost(gpu, tmp_path, monkeypatch) -> None:  # noqa: F811
    """Of a run with more steps than the report has room for, neighbouring steps share a point."""
    monkeypatch.setattr("hf_memopt.prediction.memory.run.run_record.StepPeaks.__init__.__defaults__", (8,))
    sizes = [(step * 37) % 101 * MIB for step in range(1, 41)]
    trainer = attach(make_trainer(None, tmp_path, [MemoryReportCallback()], num_train_epochs=10))
    forwards = iter(sizes)
    trainer.model.register_forward_hook(lambda *_: gpu.touch(next(forwards)))
    trainer.train()
    points = json.loads((tmp_path / "memopt_run.json").read_text())["steps"]["forward_backward"]
    assert len(points["first"]) <= 8
    for first, end, size in zip(points["first"], [*points["first"][1:], 41], points["bytes"], strict=True):
        assert size == WEIGHTS + max(sizes[first - 1 : end - 1])


def test_a_model_card_gets_the_section_once(gpu, tmp_path, figures) -> None:  # noqa: F811
    callback = MemoryReportCallback()
    assert callback.model_card() == ""
    trainer = attach(make_trainer(gpu, tmp_path, [callback]))
    trainer.train()
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert card.endswith(callback.model_card())
    assert callback.model_card() == (
        "## Training memory\n\nMeasured on a GPU by `hf_memopt.MemoryReportCallback`:\n\n"
        "| phase | peak allocated | peak reserved |\n|---|---|---|\n"
        "| load | 1000.0 MiB | 1000.0 MiB |\n"  # attach has not run the model
        "| forward + backward | 1.66 GiB | 1.66 GiB |\n"
        "| optimizer | 1.46 GiB | 1.66 GiB |\n\n"
        f"Batch: 4 x 1 examples per step and device; fp32, optimizer `{trainer.args.optim.value}`.\n"
    )
    trainer.memopt_handle.remove()
    assert "create_model_card" not in vars(trainer)


def test_an_older_section_is_replaced_and_a_missing_card_stays_missing(gpu, tmp_path, figures) -> None:  # noqa: F811
    callback = MemoryReportCallback()
    trainer = make_trainer(gpu, tmp_path, [callback], max_steps=1)
    card: Path = tmp_path / "README.md"
    trainer.create_model_card = lambda text=None: text and card.write_text(text)
    attach(trainer).train()
    trainer.create_model_card()
    assert not card.exists()
    trainer.create_model_card("# Model\n\n## Training memory\n\nold\n\n## Results\n\n0.9\n")
    assert card.read_text() == f"# Model\n\n{callback.model_card()}## Results\n\n0.9\n"
