"""Report measured memory: the peaks of each phase in the Trainer's own log, and what a run leaves of them.

``MemoryReportCallback`` reads the allocator's counters at the events that bound a phase; they are on the host, so
nothing is synchronised. ``benchmarks/memory_report.py`` prints what that costs per step. Limitations: memory by module
or tensor, and the peaks between phases (data loading, logging, saving).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from hf_memopt.plain_data import checked_path
from hf_memopt.plotting import check_picture
from hf_memopt.prediction.memory.run.run_record import RunRecord
from hf_memopt.prediction.memory.run.run_report import (
    add_section,
    begin_report,
    draw_report,
    training_memory,
    write_failure,
    write_report,
)
from hf_memopt.training.binding import Binding, bind_late, note_trainer
from hf_memopt.training.binding.undo import UndoHandle, override_method
from hf_memopt.training.devices.readings import (
    PeakMeter,
    is_out_of_memory,
    measured_device,
    read_device_used,
    read_process,
)
from hf_memopt.units import format_bytes, to_gib

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState, TrainingArguments

MEMORY_KEY = re.compile(r"(^|_)memory_\w+_gib$")
PHASES = ("load", "forward_backward", "optimizer", "evaluation")


class PhasePeaks:
    """The peaks of a meter by phase: over the run in ``summary``, and since the last log by ``take``.

    Both map a phase to its peaks in bytes by kind, as ``PeakMeter.read`` names them.
    """

    def __init__(self, meter: PeakMeter) -> None:
        self.meter = meter
        self.summary: dict[str, dict[str, int]] = {}
        self._new: dict[str, dict[str, int]] = {}

    def close(self, phase: str) -> dict[str, int]:
        """End the current span, which belonged to ``phase``, and return its peaks."""
        found = self.meter.read()
        for kind, peak_bytes in found.items():
            for phases in (self.summary, self._new):
                known = phases.setdefault(phase, {})
                known[kind] = max(peak_bytes, known.get(kind, 0))
        return found

    def take(self, *phases: str) -> dict[str, dict[str, int]]:
        """Return the peaks of ``phases`` since they were last taken."""
        return {phase: self._new.pop(phase) for phase in phases if phase in self._new}

    def restart(self) -> None:
        """Drop all phases."""
        self.summary, self._new = {}, {}


class MemoryReportCallback(TrainerCallback):
    """Log the memory peaks of each phase, for every ``report_to`` sink.

    Phases: ``load`` (everything before the first step: model, optimizer, checkpoint), ``forward_backward`` (all
    forward and backward passes of a step), ``optimizer`` (its step), ``evaluation`` (including the gathering of
    predictions and the metrics; ``predict`` too). Logged keys, in GiB as floats, for the phases since the last log:

    | key | log | value |
    |---|---|---|
    | ``memory_<phase>_peak_allocated_gib`` | training | peak of torch's allocated bytes (CUDA, ROCm, XPU) |
    | ``memory_<phase>_peak_reserved_gib`` | training | peak of its reserved bytes |
    | ``memory_device_used_gib`` | training | all processes on the device now, by NVML or the driver, if available |
    | ``memory_process_rss_gib`` | training | resident memory of this process now |
    | ``<prefix>_memory_peak_..._gib`` | evaluation, ``predict`` | the phase under its metrics' prefix, as ``eval`` |
    | ``train_memory_<phase>_peak_..._gib`` | closing log | peaks of the whole run; in ``train().metrics`` too |
    | ``train_memory_device_used_gib`` | closing log | as above |
    | ``train_memory_process_peak_rss_gib`` | closing log | peak of this process's resident memory |

    MPS has no peaks, so there the keys are ``..._allocated_gib`` and ``..._reserved_gib``, the largest samples; without
    an accelerator ``..._rss_gib``, the resident memory of the process (see ``PeakMeter``). The metrics that a
    hyperparameter search gets are without memory: its default objective is the sum of all metrics.

    The sinks of ``report_to`` come before all other callbacks, so the callback moves to the front when it is bound.
    The console then shows one figure, ``memory_gib``: the largest peak of these phases.

    A phase is measured by **resetting torch's peak counters** when it begins: ``torch.cuda.max_memory_allocated()``
    then covers the last phase only, and so does what stock's ``skip_memory_metrics=False`` logs. Read ``summary``
    instead. Under DeepSpeed, whose engine steps within its backward pass, ``forward_backward`` includes the optimizer.
    One device is read, ``args.device`` of this process. A model card that an attached Trainer writes gets the section
    "Training memory", the text of ``model_card()``.

    Bound, it also leaves a report in the output folder, ``memopt_run.json``, at each checkpoint and at the end. When
    training ends it writes the page of it, ``memopt_run.html``, and logs the path. An out-of-memory that ends the run
    leaves a page with what was alive, what the step was predicted to need, and what fits. The error goes on and has the
    path of the page as a note. Every process then writes its own (``memopt_run-rank1.html``).

    Args:
        plot: a PNG, SVG or PDF file to draw at the end of ``train()``: the peak of every step and phase, beside what is
            predicted for the largest batch of an attached Trainer on an accelerator, which takes some seconds. A
            picture that fails is reported, and training ends as without it.
        report: whether to leave the report.
        predict: whether to simulate the largest batch for the report when training ends.

    Raises:
        ValueError: ``plot`` is not such a file, or its folder is missing.
        MissingExtraError: ``plot`` without matplotlib.

    Examples:
        >>> report = MemoryReportCallback()  # Trainer(..., callbacks=[report]); trainer.train()
        >>> report.summary, report.table()
        ({}, 'no phase measured yet')
    """

    technique = "memory report"
    only_watches = True  # see ``binding.passed_parts``

    def __init__(self, plot: str | Path | None = None, *, report: bool = True, predict: bool = False) -> None:
        if plot is not None:
            check_picture(checked_path("plot", plot), purpose="the picture of a memory report")
        self.plot = plot
        self.report = report
        self.predict = predict
        self.binding = Binding()
        self._reset()

    def _reset(self) -> None:
        self._peaks: PhasePeaks | None = None
        self._trained = False  # train() began
        self._training = False  # and did not end
        self._evaluating = False
        self._evaluation_keys: tuple[str, ...] = ()
        self._record = RunRecord()  # of the last train()

    @property
    def summary(self) -> dict[str, dict[str, int]]:
        """The peaks in bytes by phase and kind, of the last ``train()`` and what followed it.

        The first ``train()`` keeps what was measured since the Trainer was created; every further one starts anew.

        Kinds are ``peak_allocated_bytes`` and ``peak_reserved_bytes``; on MPS ``allocated_bytes`` and
        ``reserved_bytes``; without an accelerator ``rss_bytes``.
        """
        peaks = {} if self._peaks is None else self._peaks.summary
        return {phase: dict(peaks[phase]) for phase in PHASES if phase in peaks}

    def table(self) -> str:
        """Return ``summary`` as a table."""
        summary = self.summary
        if not summary:
            return "no phase measured yet"
        kinds = list(next(iter(summary.values())))
        rows = [["phase", *(kind.removesuffix("_bytes").replace("_", " ") for kind in kinds)]]
        for phase, peaks in summary.items():
            rows.append([phase.replace("_", "+"), *(format_bytes(peaks[kind]) for kind in kinds)])
        return "\n".join(f"{first:<18}" + "".join(f"{cell:>16}" for cell in cells) for first, *cells in rows)

    def model_card(self) -> str:
        """Return the section "Training memory" of a model card as Markdown; "" where nothing was measured."""
        peaks = self._peaks
        return "" if peaks is None else training_memory(self.summary, peaks.meter.device, self.binding.trainer)

    @property
    def handle(self) -> UndoHandle:
        """Undoes what ``attach`` put over the trainer for it."""
        return self.binding.handle

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Move to the front of the trainer's callbacks, before the sinks of ``report_to``; ``attach`` calls this."""
        handler = trainer.callback_handler
        # a new list: bound at ``on_train_begin``, the one of now is being read
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        self._begin(trainer.args).meter.skip()  # what attach itself runs is not loading
        consoles = [one for one in handler.callbacks if isinstance(one, (ProgressCallback, PrinterCallback))]
        overrides = [override_method(one, "on_log", _with_one_figure) for one in consoles]
        overrides += [
            override_method(trainer, "create_model_card", self._create_model_card),
            override_method(trainer, "get_batch_samples", self._get_batch_samples),
            override_method(trainer, "compute_loss", partial(self._watched, "run_forward")),
            override_method(trainer.accelerator, "backward", partial(self._watched, "run_backward")),
            override_method(trainer, "train", self._train),
        ]
        return self.binding.to(trainer, *overrides)

    def _reported(self) -> Any:
        """Return the trainer whose run is reported; None where none is: unbound, not asked for, or set aside."""
        trainer = self.binding.trainer
        is_asked = self.report and trainer is not None and not trainer.state.is_hyper_param_search
        return trainer if is_asked and self in trainer.callback_handler.callbacks else None

    def _watched(self, name: str, before: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a pass by a method of the record."""
        trainer = self._reported()
        if trainer is None:
            return before(*args, **kwargs)
        return getattr(self._record, name)(trainer, before, *args, **kwargs)

    def _train(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._record = RunRecord()
        try:
            return before(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error) and (trainer := self._reported()) is not None:
                write_failure(trainer, error, self.summary, self._record)
            raise

    def _create_model_card(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found, trainer = before(*args, **kwargs), self.binding.trainer
        if trainer is not None and trainer.is_world_process_zero() and (section := self.model_card()):
            add_section(Path(trainer.args.output_dir) / "README.md", section)
        return found

    def _get_batch_samples(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._record.begin_step()
        batches, *rest = before(*args, **kwargs)
        if self.plot is not None or self._reported() is not None:
            self._record.look_at(batches)
        return batches, *rest

    def _begin(self, args: TrainingArguments) -> PhasePeaks:
        """Return the peaks; the first call ends the span before the Trainer was created."""
        if self._peaks is None:
            self._peaks = PhasePeaks(PeakMeter(measured_device(args.device)))
            self._peaks.close("load")
        return self._peaks

    # ---- events, in the order of a run

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._reset()
        self._begin(args)
        note_trainer(self)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        bind_late(self, state)
        if args.report_to:
            self.binding.serving(self, state)
        peaks = self._begin(args)
        if self._trained:
            peaks.restart()
        if self._training:  # an interrupted run, or a restart with a smaller batch: its peak is not loading
            peaks.meter.skip()
        else:
            self._record = RunRecord()
        self._record.begin(state.global_step)
        peaks.close("load")
        self._trained = self._training = True
        if (trainer := self._reported()) is not None:
            begin_report(trainer, self.summary, self._record)

    def on_step_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._begin(args).meter.skip()
        self._evaluating = False  # if an evaluation broke off

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if self._begin(args).meter.only_samples:
            self._close("forward_backward", args, state.global_step + 1)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self._close("forward_backward", args, state.global_step + 1)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self._close("optimizer", args, state.global_step + 1)

    def _close(self, phase: str, args: TrainingArguments, step: int) -> None:
        self._record.add(phase, step, self._begin(args).close(phase))
        if (trainer := self._reported()) is not None:
            self._record.end_phase(trainer, phase)

    def on_step_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._begin(args).meter.skip()  # an evaluation may begin here, and the gradients are gone now
        self._record.end_step()
        self._record.phase = "between steps"

    def on_save(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if args.should_save and (trainer := self._reported()) is not None:
            write_report(trainer, self.summary, self._record, "training")

    def on_prediction_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if self._begin(args).meter.only_samples:
            self._begin(args).close("evaluation")
        self._evaluating = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *_: Any, logs: dict[str, Any] | None = None, **__: Any
    ) -> None:
        if logs is None:
            return
        peaks = self._begin(args)
        used_bytes = read_device_used(peaks.meter.device)
        if self._evaluating:
            figures = self._close_evaluation(args, state, logs)
            self._evaluation_keys = tuple(figures)
        elif {"train_runtime", "train_loss"} <= logs.keys():  # the closing log of train()
            peaks.take(*PHASES)
            process = {"process_peak_rss_bytes": read_process()[1]}
            figures = _figures("train_memory", peaks.summary, device_used_bytes=used_bytes, **process)
        else:
            process = {"process_rss_bytes": read_process()[0]}
            figures = _figures("memory", peaks.take(*PHASES), device_used_bytes=used_bytes, **process)
            if "loss" in logs and self._reported() is not None:
                self._record.log(state.global_step, float(logs["loss"]))
        history = state.log_history[-1] if state.log_history else {}
        if history.get("step") == state.global_step and logs.keys() <= history.keys():
            history.update(figures)  # the Trainer's own copy of these logs
        logs.update(figures)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, *_: Any, metrics: dict[str, Any] | None = None, **__: Any
    ) -> None:
        if metrics is not None and state.is_hyper_param_search:
            for key in self._evaluation_keys:
                metrics.pop(key, None)

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: Any, metrics: dict[str, Any], **_: Any
    ) -> None:
        if self._evaluating:
            metrics.update(self._close_evaluation(args, state, metrics))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        peaks = self._begin(args)
        peaks.meter.skip()
        self._training = False
        if self.plot is not None and state.is_world_process_zero and self._record.peaks:
            draw_report(Path(self.plot), self.summary, self._record, peaks.meter.device, self.binding.trainer)
        if args.should_save and (trainer := self._reported()) is not None:
            write_report(trainer, self.summary, self._record, "finished", predict=self.predict)

    def _close_evaluation(
        self, args: TrainingArguments, state: TrainerState, metrics: dict[str, Any]
    ) -> dict[str, float]:
        self._evaluating = False
        self._close("evaluation", args, state.global_step)
        prefix = next((key.removesuffix("_runtime") for key in metrics if key.endswith("_runtime")), "eval")
        return _figures(f"{prefix}_memory", {}, **self._begin(args).take("evaluation")["evaluation"])


def _with_one_figure(before: Callable[..., Any], *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Print one figure of memory in the console, the largest peak, since a line has no room for all that sinks get."""
    if logs is None:
        return before(*args, logs=logs, **kwargs)
    shown = {key: value for key, value in logs.items() if not MEMORY_KEY.search(key)}
    for kind in ("reserved", "allocated", "rss"):
        if peaks := [logs[key] for key in logs.keys() - shown.keys() if kind in key]:
            shown["memory_gib"] = round(max(peaks), 2)
            break
    return before(*args, logs=shown, **kwargs)


def _figures(prefix: str, phases: Mapping[str, Mapping[str, int]], **now: int | None) -> dict[str, float]:
    """Return the figures of a log in GiB: the peaks of phases, and further sizes that are known."""
    found = {f"{phase}_{kind}": size for phase, peaks in phases.items() for kind, size in peaks.items()}
    return {
        f"{prefix}_{kind.removesuffix('_bytes')}_gib": to_gib(size)
        for kind, size in {**found, **now}.items()
        if size is not None
    }
