"""Report measured memory: the peaks of each phase in the Trainer's own log, or the current use in one line.

``MemoryReportCallback`` reads the allocator's counters at the events that bound a phase; they are on the host, so
nothing is synchronised. ``benchmarks/memory_report.py`` prints what that costs per step. Limitations: memory by module
or tensor, and the peaks between phases (data loading, logging, saving).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.handles import UndoHandle, override_method
from hf_memopt.devices.memory_reading import (
    MemoryReading,
    PeakMeter,
    measured_device,
    read_device_used,
    read_memory,
    read_process,
)
from hf_memopt.memory.output.model_card import training_memory, with_section
from hf_memopt.memory.run_record import RunRecord
from hf_memopt.plotting import check_picture
from hf_memopt.units import format_bytes, to_gib

if TYPE_CHECKING:
    import torch
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import TrainOutput

__all__ = ["PHASES", "MemoryReportCallback", "PhasePeaks", "print_gpu_utilization", "print_summary"]

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
    """Write the memory peaks of each phase to the Trainer's log, so that every ``report_to`` sink sees them.

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

    The sinks of ``report_to`` come before all other callbacks, so the callback must be moved to the front, which
    ``attach(trainer)`` does. The console then shows one figure, ``memory_gib``: the largest peak of these phases.
    Without a sink (``report_to="none"``) it also works unbound.

    A phase is measured by **resetting torch's peak counters** when it begins: ``torch.cuda.max_memory_allocated()``
    then covers the last phase only. Read ``summary`` instead. One device is read, ``args.device`` of this process. A
    model card that an attached Trainer writes gets the section "Training memory", the text of ``model_card()``.

    Args:
        plot: a PNG, SVG or PDF file to draw at the end of ``train()``: the peak of every step and phase, beside what is
            predicted for the largest batch of an attached Trainer on an accelerator, which takes some seconds. A
            picture that fails is reported, and training ends as without it.

    Raises:
        ValueError: ``plot`` is not such a file, or its folder is missing.
        MissingExtraError: ``plot`` without matplotlib.

    Examples:
        >>> report = MemoryReportCallback()  # Trainer(..., callbacks=[report]); attach(trainer); trainer.train()
        >>> report.summary, report.table()
        ({}, 'no phase measured yet')
    """

    technique = "memory report"

    def __init__(self, plot: str | Path | None = None) -> None:
        if plot is not None:
            check_picture(Path(plot), purpose="the picture of a memory report")
        self.plot = plot
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
        return (
            "" if self._peaks is None else training_memory(self.summary, self._peaks.meter.device, self.binding.trainer)
        )

    @property
    def handle(self) -> UndoHandle:
        """Undoes what ``attach`` put over the trainer for it."""
        return self.binding.handle

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Move to the front of the trainer's callbacks, before the sinks of ``report_to``; ``attach`` calls this."""
        handler = trainer.callback_handler
        handler.callbacks[:] = [self, *(callback for callback in handler.callbacks if callback is not self)]
        self._begin(trainer.args).meter.skip()  # what attach itself runs is not loading
        consoles = [one for one in handler.callbacks if isinstance(one, (ProgressCallback, PrinterCallback))]
        overrides = [override_method(one, "on_log", _with_one_figure) for one in consoles]
        overrides.append(
            override_method(trainer, "create_model_card", partial(with_section, self.model_card, self.binding))
        )
        if self.plot is not None:
            overrides.append(override_method(trainer, "get_batch_samples", self._noting_batches))
        return self.binding.to(trainer, *overrides)

    def _noting_batches(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            batches, *rest = before(*args, **kwargs)
            self._record.look_at(batches)
            return batches, *rest

        return get_batch_samples

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

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if args.report_to:
            self.binding.serving(self, state)
        peaks = self._begin(args)
        if self._trained:
            peaks.restart()
        if self._training:  # an interrupted run, or a restart with a smaller batch: its peak is not loading
            peaks.meter.skip()
        else:
            self._record = RunRecord()
        peaks.close("load")
        self._trained = self._training = True

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
        found = self._begin(args).close(phase)
        if self.plot is not None:
            self._record.add(phase, step, found)

    def on_step_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._begin(args).meter.skip()  # an evaluation may begin here, and the gradients are gone now

    def on_prediction_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if self._begin(args).meter.only_samples:
            self._begin(args).close("evaluation")
        self._evaluating = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None:
            return
        peaks = self._begin(args)
        if self._evaluating:
            figures = self._close_evaluation(args, state, logs)
            self._evaluation_keys = tuple(figures)
        elif {"train_runtime", "train_loss"} <= logs.keys():  # the closing log of train()
            peaks.take(*PHASES)
            figures = _run_figures(peaks)
        else:
            figures = _step_figures(peaks)
        history = state.log_history[-1] if state.log_history else {}
        if history.get("step") == state.global_step and logs.keys() <= history.keys():
            history.update(figures)  # the Trainer's own copy of these logs
        logs.update(figures)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if metrics is not None and state.is_hyper_param_search:
            for key in self._evaluation_keys:
                metrics.pop(key, None)

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        if self._evaluating:
            metrics.update(self._close_evaluation(args, state, metrics))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        peaks = self._begin(args)
        peaks.meter.skip()
        self._training = False
        if self.plot is not None and state.is_world_process_zero and self._record.peaks:
            self._record.draw(Path(self.plot), self.summary, peaks.meter.device, self.binding.trainer)

    def _close_evaluation(
        self, args: TrainingArguments, state: TrainerState, metrics: dict[str, Any]
    ) -> dict[str, float]:
        self._evaluating = False
        self._close("evaluation", args, state.global_step)
        prefix = next((key.removesuffix("_runtime") for key in metrics if key.endswith("_runtime")), "eval")
        return _named(f"{prefix}_memory", self._begin(args).take("evaluation")["evaluation"])


def _with_one_figure(before: Callable[..., Any]) -> Callable[..., Any]:
    """Print one figure of memory in the console, the largest peak, since a line has no room for all that sinks get."""

    def on_log(*args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        if logs is None:
            return before(*args, logs=logs, **kwargs)
        shown = {key: value for key, value in logs.items() if not MEMORY_KEY.search(key)}
        for kind in ("reserved", "allocated", "rss"):
            if peaks := [logs[key] for key in logs.keys() - shown.keys() if kind in key]:
                shown["memory_gib"] = round(max(peaks), 2)
                break
        return before(*args, logs=shown, **kwargs)

    return on_log


def _named(prefix: str, peaks: dict[str, int]) -> dict[str, float]:
    return {f"{prefix}_{kind.removesuffix('_bytes')}_gib": to_gib(size_bytes) for kind, size_bytes in peaks.items()}


def _step_figures(peaks: PhasePeaks) -> dict[str, float]:
    """Return the figures of a log during training: the phases since the last one, and the current memory."""
    figures: dict[str, float] = {}
    for phase, phase_peaks in peaks.take(*PHASES).items():
        figures |= _named(f"memory_{phase}", phase_peaks)
    return figures | _named("memory", _device_used(peaks) | {"process_rss_bytes": read_process()[0]})


def _run_figures(peaks: PhasePeaks) -> dict[str, float]:
    """Return the figures of the closing log: the phases of the whole run, and the peak of the process."""
    figures: dict[str, float] = {}
    for phase, phase_peaks in peaks.summary.items():
        figures |= _named(f"train_memory_{phase}", phase_peaks)
    peak_rss_bytes = read_process()[1]
    process = {} if peak_rss_bytes is None else {"process_peak_rss_bytes": peak_rss_bytes}
    return figures | _named("train_memory", _device_used(peaks) | process)


def _device_used(peaks: PhasePeaks) -> dict[str, int]:
    used_bytes = read_device_used(peaks.meter.device)
    return {} if used_bytes is None else {"device_used_bytes": used_bytes}


def print_gpu_utilization(device: torch.device | str | int | None = None) -> None:
    """Print in one line how much memory is in use now, on the whole GPU and by this process.

    Without an accelerator it prints the host's memory and says so. ``device`` is as in ``read_memory``.

    Raises:
        ValueError: ``device`` does not exist.
    """
    print(_utilization(read_memory(device)))


def print_summary(result: TrainOutput, device: torch.device | str | int | None = None) -> None:
    """Print time, samples per second and memory of a run; ``result`` is what ``trainer.train()`` returned.

    With a ``MemoryReportCallback`` the peaks of each phase are printed too, then the memory in use now.

    Raises:
        ValueError: ``result`` is not the result of a training run, or ``device`` does not exist.
    """
    metrics = getattr(result, "metrics", None)
    if not isinstance(metrics, dict) or "train_runtime" not in metrics:
        raise ValueError(
            f"result={result!r} has no train_runtime; expected what trainer.train() returned. "
            "Call print_summary(trainer.train())."
        )
    utilization = _utilization(read_memory(device))
    print(f"Time: {metrics['train_runtime']:.2f} s")
    if "train_samples_per_second" in metrics:
        print(f"Samples/second: {metrics['train_samples_per_second']:.2f}")
    for key, value in metrics.items():
        if key.startswith("train_memory_"):
            print(f"{key.removeprefix('train_memory_').removesuffix('_gib').replace('_', ' ')}: {value:.3f} GiB")
    print(utilization)


def _utilization(reading: MemoryReading) -> str:
    if not reading.has_accelerator:
        peak = "" if reading.peak_rss_bytes is None else f" (peak {format_bytes(reading.peak_rss_bytes)})"
        return (
            f"Host memory, no accelerator: this process {format_bytes(reading.rss_bytes)}{peak}, "
            f"{format_bytes(reading.host_available_bytes)} of {format_bytes(reading.host_total_bytes)} available"
        )
    if reading.device_used_bytes is None:
        used = "use by all processes unavailable"
    else:
        used = f"{format_bytes(reading.device_used_bytes)} in use by all processes"
    total = "" if reading.device_total_bytes is None else f" of {format_bytes(reading.device_total_bytes)}"
    allocated, reserved = format_bytes(reading.allocated_bytes or 0), format_bytes(reading.reserved_bytes or 0)
    device_name = f"{reading.device} ({reading.device_name})"
    return f"{device_name}: {used}{total}; torch here: {allocated} allocated, {reserved} reserved"
