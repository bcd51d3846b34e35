"""``MemoryReportCallback`` in the real Trainer: on a fake GPU whose bytes are known, and on the host."""

from __future__ import annotations

import ast
import resource
import sys
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from played_allocator import PlayedAllocator
from tables import refuses
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_utils import TrainOutput

import tiny
from hf_memopt import MemoryReportCallback, attach, print_gpu_utilization, print_summary
from hf_memopt.types import MemoryReading

GIB = 2**30
MIB = 2**20
MODULE = "hf_memopt.prediction.memory.run.callback"

# what each part of a run holds on the fake GPU, in bytes
WEIGHTS, STATE, TRAIN_FORWARD, OPTIMIZER, EVALUATION = 1000 * MIB, 200 * MIB, 500 * MIB, 300 * MIB, 700 * MIB
PASSES = WEIGHTS + STATE + TRAIN_FORWARD


class FakeGpu(PlayedAllocator):
    """A GPU of which NVML tells ``used_bytes``."""

    used_bytes = 9 * GIB


class Sink(TrainerCallback):
    """What an integration of ``report_to`` does: it keeps what it is given, when it is given."""

    def __init__(self):
        self.logs, self.predictions = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))

    def on_predict(self, args, state, control, metrics, **kwargs):
        self.predictions.append(dict(metrics))


class Hungry(TrainerCallback):
    """Takes much memory at an event that belongs to no phase."""

    def __init__(self, gpu, event):
        setattr(self, event, lambda *args, **kwargs: gpu.touch(50 * GIB))


class StatefulSGD(torch.optim.SGD):
    """SGD that takes its share of the fake GPU: state at the first step, a temporary in each."""

    gpu: FakeGpu

    def step(self, closure=None):
        if not self.state:
            self.gpu.hold(STATE)
            self.state["made"] = True
        self.gpu.touch(OPTIMIZER)
        return super().step(closure)


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU that the tiny model's forward pass and the optimizer use; the Trainer itself runs on the CPU."""
    gpu = FakeGpu()
    gpu.hold(WEIGHTS)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", gpu.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.reset)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(f"{MODULE}.measured_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(f"{MODULE}.read_device_used", lambda device: gpu.used_bytes)
    monkeypatch.setattr(f"{MODULE}.read_process", lambda: (2 * GIB, 3 * GIB))
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "sink", Sink)
    return gpu


def make_trainer(gpu, output_dir, callbacks, **settings) -> Any:
    """Return a stock Trainer on a tiny BERT that uses the fake GPU; 16 examples, batch 4."""
    model = tiny.bert()

    def use_gpu(module, args, output):
        gpu.touch(TRAIN_FORWARD if module.training else EVALUATION)

    if gpu is not None:
        model.register_forward_hook(use_gpu)
    optimizer = StatefulSGD(model.parameters(), lr=0.1)
    optimizer.gpu = gpu or FakeGpu()
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    return Trainer(
        model=model,
        args=tiny.arguments(output_dir, **{**sizes, "logging_strategy": "steps", "logging_steps": 2, **settings}),
        train_dataset=tiny.rows(16),
        eval_dataset=tiny.rows(8),
        optimizers=(optimizer, None),
        callbacks=callbacks,
    )


def bound(gpu, output_dir, *others, **settings) -> tuple[MemoryReportCallback, Any]:
    """Return a callback that is bound to a Trainer, and the Trainer, whose logs a sink keeps."""
    callback = MemoryReportCallback()
    with_sink = {} if gpu is None else {"report_to": "sink"}
    trainer = make_trainer(gpu, output_dir, [callback, *others], **{**with_sink, **settings})
    callback.bind(trainer)
    return callback, trainer


def memory_of(logs):
    return {key: value for key, value in logs.items() if "memory" in key}


def sink_of(trainer):
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Sink))


def peaks(allocated, reserved=None):
    return {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved or allocated}


def logged(prefix, phases):
    return {
        f"{prefix}{phase}_{kind.removesuffix('_bytes')}_gib": size / GIB
        for phase, sizes in phases.items()
        for kind, size in sizes.items()
    }


LOAD = {"load": peaks(WEIGHTS)}
STEPS = {"forward_backward": peaks(PASSES), "optimizer": peaks(WEIGHTS + STATE + OPTIMIZER, PASSES)}
EVALUATED = {"evaluation": peaks(WEIGHTS + STATE + EVALUATION)}
SECOND_LOG = {**logged("memory_", STEPS), "memory_device_used_gib": 9.0, "memory_process_rss_gib": 2.0}
FIRST_LOG = {**logged("memory_", LOAD), **SECOND_LOG}
EVALUATION_LOG = {key.replace("_evaluation", ""): size for key, size in logged("eval_memory_", EVALUATED).items()}
CLOSING_LOG = {
    **logged("train_memory_", {**LOAD, **STEPS, **EVALUATED}),
    **{"train_memory_device_used_gib": 9.0, "train_memory_process_peak_rss_gib": 3.0},
}


def test_every_sink_history_and_result_get_the_exact_peaks_of_each_phase(gpu, tmp_path):
    callback, trainer = bound(gpu, tmp_path, eval_strategy="epoch")
    result = trainer.train()
    sink = sink_of(trainer)
    expected = [FIRST_LOG, SECOND_LOG, EVALUATION_LOG, CLOSING_LOG]
    assert [memory_of(logs) for logs in sink.logs] == expected
    assert [memory_of(logs) for logs in trainer.state.log_history] == expected
    assert memory_of(result.metrics) == CLOSING_LOG
    assert "loss" in sink.logs[0]
    assert "eval_loss" in sink.logs[2]
    assert callback.summary == {**LOAD, **STEPS, **EVALUATED}
    assert callback.table() == (
        "phase               peak allocated   peak reserved\n"
        "load                    1000.0 MiB      1000.0 MiB\n"
        "forward+backward          1.66 GiB        1.66 GiB\n"
        "optimizer                 1.46 GiB        1.66 GiB\n"
        "evaluation                1.86 GiB        1.86 GiB"
    )


def test_the_console_shows_one_figure_and_sinks_get_all(gpu, tmp_path, capsys):
    callback = MemoryReportCallback()
    trainer = make_trainer(gpu, tmp_path, [callback], report_to="sink", logging_steps=4)
    handle = callback.bind(trainer)
    trainer.train()
    first = capsys.readouterr().out.splitlines()[0]
    assert ast.literal_eval(first)["memory_gib"] == str(round(PASSES / GIB, 2))
    assert "memory_optimizer" not in first
    assert memory_of(sink_of(trainer).logs[0]) == FIRST_LOG
    handle.remove()
    trainer.log({"memory_device_used_gib": 1.0})
    assert "memory_device_used_gib" in capsys.readouterr().out


@pytest.mark.parametrize("event", ["on_log", "on_epoch_end"])
def test_what_lies_between_two_steps_and_at_the_end_belongs_to_no_phase(gpu, tmp_path, event):
    callback, trainer = bound(gpu, tmp_path, Hungry(gpu, event))
    trainer.train()
    assert memory_of(trainer.evaluate())["eval_memory_peak_allocated_gib"] == (WEIGHTS + STATE + EVALUATION) / GIB
    assert {peaks["peak_allocated_bytes"] for peaks in callback.summary.values()} == {
        *(WEIGHTS, PASSES, WEIGHTS + STATE + OPTIMIZER, WEIGHTS + STATE + EVALUATION)
    }


def test_each_evaluation_set_has_its_own_keys(gpu, tmp_path):
    _, trainer = bound(gpu, tmp_path)
    metrics = trainer.evaluate({"a": tiny.rows(4), "b": tiny.rows(4)})
    keys = [{f"eval_{name}_memory_peak_{kind}_gib" for kind in ("allocated", "reserved")} for name in "ab"]
    assert memory_of(metrics) == dict.fromkeys(keys[0] | keys[1], (WEIGHTS + EVALUATION) / GIB)
    assert [set(memory_of(logs)) for logs in sink_of(trainer).logs] == keys


def test_predict_alone_reports_in_its_metrics_and_to_the_sinks(gpu, tmp_path):
    callback, trainer = bound(gpu, tmp_path)
    metrics = trainer.predict(tiny.rows(8)).metrics
    keys = ("test_memory_peak_allocated_gib", "test_memory_peak_reserved_gib")
    assert memory_of(metrics) == dict.fromkeys(keys, (WEIGHTS + EVALUATION) / GIB)
    assert [memory_of(given) for given in sink_of(trainer).predictions] == [memory_of(metrics)]
    assert set(callback.summary) == {"load", "evaluation"}


def test_a_second_train_starts_afresh(gpu, tmp_path):
    callback, trainer = bound(gpu, tmp_path, eval_strategy="epoch")
    trainer.train()
    sink_of(trainer).logs.clear()
    trainer.args.eval_strategy = "no"
    trainer.train()
    assert memory_of(sink_of(trainer).logs[0])["memory_load_peak_allocated_gib"] == (WEIGHTS + STATE) / GIB
    assert set(callback.summary) == {"load", "forward_backward", "optimizer"}
    assert callback.summary["load"]["peak_allocated_bytes"] == WEIGHTS + STATE


def test_logs_of_the_user_get_the_moment_and_a_foreign_history_stays_as_it_is(gpu, tmp_path):
    callback, trainer = bound(gpu, tmp_path, logging_strategy="no")
    trainer.train()
    trainer.log({"mine": 1.0})  # the phases of the training before it are not repeated
    found = memory_of(trainer.state.log_history[-1])
    assert found == {"memory_device_used_gib": 9.0, "memory_process_rss_gib": 2.0}
    foreign = {"loss": 1.0, "step": 0}
    trainer.state.log_history.append(dict(foreign))
    logs = {"never": "appended"}
    callback.on_log(trainer.args, trainer.state, trainer.control, logs=logs)
    assert trainer.state.log_history[-1] == foreign
    assert logs["memory_device_used_gib"] == 9.0


@pytest.mark.parametrize("added_late", [False, True])
def test_it_binds_itself_where_it_was_passed_or_added(gpu, tmp_path, added_late):
    callback = MemoryReportCallback()
    trainer = make_trainer(gpu, tmp_path, [] if added_late else [callback])
    if added_late:
        trainer.add_callback(callback)  # behind the PrinterCallback, which takes things out of the logs
    result = trainer.train()
    expected = {key: value for key, value in CLOSING_LOG.items() if "evaluation" not in key}
    assert [memory_of(logs) for logs in trainer.state.log_history] == [FIRST_LOG, SECOND_LOG, expected]
    assert memory_of(result.metrics) == expected


def test_binding_puts_it_once_in_front_of_all_and_attach_binds_it(gpu, tmp_path):
    callback = MemoryReportCallback()
    trainer = make_trainer(gpu, tmp_path, [callback], report_to="sink")
    others = [other for other in trainer.callback_handler.callbacks if other is not callback]
    for bind in (callback.bind, attach):
        bind(trainer)
        assert trainer.callback_handler.callbacks == [callback, *others]
    trainer.train()
    assert set(memory_of(sink_of(trainer).logs[0])) == set(FIRST_LOG)


@pytest.mark.skipif(sys.platform != "linux", reason="where psutil tells no peak, a rise cannot be seen")
def test_the_host_is_measured_for_real(tmp_path):
    callback, trainer = bound(None, tmp_path)
    tops = []

    def rise_above_every_earlier_peak(*_):
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        tops.append(peak_bytes + 64 * MIB)
        bytearray(b"x" * (peak_bytes - psutil.Process().memory_info().rss + 128 * MIB))
        rising.remove()

    rising = trainer.model.register_forward_hook(rise_above_every_earlier_peak)
    result = trainer.train()
    trainer.evaluate()
    rss = {phase: found["rss_bytes"] for phase, found in callback.summary.items()}
    assert set(rss) == {"load", "forward_backward", "optimizer", "evaluation"}
    assert rss["forward_backward"] > tops[0]
    assert 0 < rss["optimizer"] < rss["forward_backward"]
    assert 0 < rss["evaluation"] < rss["forward_backward"]
    phases = {f"{phase}_rss_gib" for phase in ("load", "forward_backward", "optimizer")}
    closing = {f"train_memory_{name}" for name in {*phases, "process_peak_rss_gib"}}
    assert set(memory_of(result.metrics)) == closing
    assert set(memory_of(trainer.state.log_history[0])) == {f"memory_{name}" for name in {*phases, "process_rss_gib"}}


@pytest.mark.gpu
def test_a_real_gpu_is_reported_phase_by_phase(tmp_path):
    callback, trainer = bound(None, tmp_path, use_cpu=False, eval_strategy="epoch")
    weights_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    trainer.train()
    assert set(callback.summary) == {"load", "forward_backward", "optimizer", "evaluation"}
    for found in callback.summary.values():
        assert weights_bytes <= found["peak_allocated_bytes"] <= found["peak_reserved_bytes"]
    forward, evaluation = callback.summary["forward_backward"], callback.summary["evaluation"]
    assert forward["peak_allocated_bytes"] >= evaluation["peak_allocated_bytes"]  # it holds gradients and activations


HOST = MemoryReading("cpu", "x86_64", GIB, 3 * GIB // 2, 8 * GIB, 3 * GIB)
HOST_LINE = "Host memory, no accelerator: this process 1.00 GiB (peak 1.50 GiB), 3.00 GiB of 8.00 GiB available\n"
PRINTING = "hf_memopt.prediction.memory.run.printed_memory.read_memory"


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (HOST, HOST_LINE),
        (replace(HOST, peak_rss_bytes=None), HOST_LINE.replace(" (peak 1.50 GiB)", "")),
        (
            MemoryReading("cuda:0", "Fake 16", GIB, GIB, GIB, GIB, GIB, 2 * GIB, GIB, GIB, 16 * GIB, 5 * GIB),
            "cuda:0 (Fake 16): 5.00 GiB in use by all processes of 16.00 GiB; torch here: 1.00 GiB allocated, "
            "2.00 GiB reserved\n",
        ),
        (
            MemoryReading("mps:0", "Apple M2", GIB, GIB, GIB, GIB, GIB, 2 * GIB, None, None, 11 * GIB, None),
            "mps:0 (Apple M2): use by all processes unavailable of 11.00 GiB; torch here: 1.00 GiB allocated, "
            "2.00 GiB reserved\n",
        ),
    ],
)
def test_utilization_is_one_line_on_every_backend(monkeypatch, capsys, found, line):
    print_gpu_utilization("cpu")
    assert capsys.readouterr().out.startswith("Host memory, no accelerator: this process ")
    monkeypatch.setattr(PRINTING, lambda device: found)
    print_gpu_utilization()
    assert capsys.readouterr().out == line


def test_summary_prints_time_speed_and_the_peaks_of_the_run(monkeypatch, capsys):
    monkeypatch.setattr(PRINTING, lambda device: HOST)
    metrics = {
        "train_runtime": 12.3456,
        "train_samples_per_second": 99.876,
        "train_loss": 1.0,
        "train_memory_forward_backward_peak_allocated_gib": 1.5,
        "train_memory_process_peak_rss_gib": 0.25,
    }
    print_summary(TrainOutput(3, 1.0, metrics))
    assert capsys.readouterr().out == (
        "Time: 12.35 s\n"
        "Samples/second: 99.88\n"
        "forward backward peak allocated: 1.500 GiB\n"
        "process peak rss: 0.250 GiB\n" + HOST_LINE
    )
    print_summary(TrainOutput(0, 1.0, {"train_runtime": 0.0}))  # without the callback and without a speed
    assert capsys.readouterr().out == "Time: 0.00 s\n" + HOST_LINE


@pytest.mark.parametrize("result", [None, TrainOutput(0, 1.0, {}), {"train_runtime": 1.0}])
def test_summary_of_something_else_is_refused_before_anything_is_printed(capsys, result):
    told = "has no train_runtime; expected what trainer.train() returned. Call print_summary(trainer.train())."
    refuses(ValueError, f"result={result!r} {told}", print_summary, result)
    assert capsys.readouterr().out == ""
