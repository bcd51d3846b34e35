"""Report measured memory: by phase in the Trainer's own log, and in one line for people.

``MemoryReportCallback`` reads the allocator's counters at the events that bound a phase; they live on the host, so
nothing is synchronised. ``benchmarks/memory_report.py`` prints what that costs per step. Left out: memory by module or
tensor, and the peaks of what lies between phases (data loading, logging, saving).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.devices.memory_reading import (
    MemoryReading,
    PeakMeter,
    measured_device,
    read_device_used,
    read_memory,
    read_process,
)
from hf_memopt.units import format_bytes, to_gib

if TYPE_CHECKING:
    import torch
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import TrainOutput

__all__ = ["PHASES", "MemoryReportCallback", "PhasePeaks", "print_gpu_utilization", "print_summary"]

PHASES = ("load", "forward_backward", "optimizer", "evaluation")


class PhasePeaks:
    """The peaks of a device by phase: over the run in ``summary``, and what is new since it was last taken.

    Both map a phase to its peaks in bytes by kind, as ``PeakMeter.read`` names them.
    """

    def __init__(self, device: torch.device) -> None:
        self.meter = PeakMeter(device)
        self.summary: dict[str, dict[str, int]] = {}
        self._new: dict[str, dict[str, int]] = {}

    def close(self, phase: str) -> None:
        """End the running span, which belonged to ``phase``."""
        for kind, peak_bytes in self.meter.read().items():
            for phases in (self.summary, self._new):
                known = phases.setdefault(phase, {})
                known[kind] = max(peak_bytes, known.get(kind, 0))

    def take(self, *phases: str) -> dict[str, dict[str, int]]:
        """Return what was closed of ``phases`` since it was last taken."""
        return {phase: self._new.pop(phase) for phase in phases if phase in self._new}

    def restart(self) -> None:
        """Forget every phase."""
        self.summary, self._new = {}, {}


class MemoryReportCallback(TrainerCallback):
    """Write the memory peaks of each phase to the Trainer's log, so that every ``report_to`` sink sees them.

    Phases: ``load`` (all before the first step: model, optimizer, checkpoint), ``forward_backward`` (all micro-batches
    of a step), ``optimizer`` (its step), ``evaluation`` (with the gathering of predictions and the metrics; ``predict``
    too). A log holds the phases that ran since the one before, in GiB as floats:

    - ``memory_<phase>_peak_allocated_gib``, ``memory_<phase>_peak_reserved_gib``: the peaks of torch's allocator (CUDA,
      ROCm, XPU); MPS keeps no peaks, so there ``..._allocated_gib`` and ``..._reserved_gib`` are the largest samples;
      without an accelerator ``..._rss_gib``, the resident memory of the process (see ``PeakMeter``);
    - ``memory_device_used_gib``: the whole card by NVML or the driver at the time of the log, if it tells;
    - ``memory_process_rss_gib``: this process on the host at the time of the log.

    The evaluation's own log has its phase under the prefix of its metrics (``eval_memory_peak_allocated_gib``), and so
    have the metrics of ``predict``. The closing log, and with it ``trainer.train().metrics``, has the peaks of the
    whole run as ``train_memory_<phase>_..._gib``, with ``train_memory_device_used_gib`` and
    ``train_memory_process_peak_rss_gib``. The metrics that a hyperparameter search gets are without memory: its default
    objective is the sum of all metrics.

    The sinks stand before all other callbacks, so the callback must be moved to the front: that is what
    ``attach(trainer)`` does. Without a sink (``report_to="none"``) it also works unbound.

    A phase is measured by **resetting torch's peak counters** at its begin: ``torch.cuda.max_memory_allocated()``
    then covers the last phase only. Read ``summary`` instead. One device is read, ``args.device`` of this process.

    Example:
        >>> report = MemoryReportCallback()  # Trainer(..., callbacks=[report]); attach(trainer); trainer.train()
        >>> report.summary, report.table()
        ({}, 'no phase measured yet')
    """

    technique = "memory report"

    def __init__(self) -> None:
        self.binding = Binding()
        self._reset()

    def _reset(self) -> None:
        self._peaks: PhasePeaks | None = None
        self._trained = False  # train() began
        self._training = False  # and did not end
        self._evaluating = False
        self._evaluation_keys: tuple[str, ...] = ()

    @property
    def summary(self) -> dict[str, dict[str, int]]:
        """The peaks in bytes by phase and kind, of the last ``train()`` and what followed it.

        The first ``train()`` keeps what was measured since the Trainer was made; every further one starts afresh.

        Kinds are ``peak_allocated_bytes`` and ``peak_reserved_bytes``; on MPS ``allocated_bytes`` and
        ``reserved_bytes``; without an accelerator ``rss_bytes``.
        """
        peaks = {} if self._peaks is None else self._peaks.summary
        return {phase: dict(peaks[phase]) for phase in PHASES if phase in peaks}

    def table(self) -> str:
        """Return ``summary`` as lines for people."""
        summary = self.summary
        if not summary:
            return "no phase measured yet"
        kinds = list(next(iter(summary.values())))
        rows = [["phase", *(kind.removesuffix("_bytes").replace("_", " ") for kind in kinds)]]
        for phase, peaks in summary.items():
            rows.append([phase.replace("_", "+"), *(format_bytes(peaks[kind]) for kind in kinds)])
        return "\n".join(f"{first:<18}" + "".join(f"{cell:>16}" for cell in cells) for first, *cells in rows)

    def bind(self, trainer: Trainer) -> None:
        """Move to the front of the trainer's callbacks, before the sinks of ``report_to``; ``attach`` calls this."""
        handler = trainer.callback_handler
        handler.callbacks[:] = [self, *(callback for callback in handler.callbacks if callback is not self)]
        if self.binding.trainer is not trainer:
            self.binding.to(trainer)
        self._begin(trainer.args).meter.skip()  # a probe of the loss, say, is no loading

    def _begin(self, args: TrainingArguments) -> PhasePeaks:
        """Return the peaks; the first call ends the span in which the process came up and the Trainer was made."""
        if self._peaks is None:
            self._peaks = PhasePeaks(measured_device(args.device))
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
        if self._training:  # the run before broke off, or starts again with a smaller batch: its peak is no loading
            peaks.meter.skip()
        peaks.close("load")
        self._trained = self._training = True

    def on_step_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._begin(args).meter.skip()
        self._evaluating = False  # if an evaluation broke off

    def on_substep_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        peaks = self._begin(args)
        if peaks.meter.only_samples:
            peaks.close("forward_backward")

    def on_pre_optimizer_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._begin(args).close("forward_backward")

    def on_optimizer_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._begin(args).close("optimizer")

    def on_step_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._begin(args).meter.skip()  # an evaluation may begin here, and the gradients are gone now

    def on_prediction_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        peaks = self._begin(args)
        if peaks.meter.only_samples:
            peaks.close("evaluation")
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
            figures = self._close_evaluation(peaks, logs)
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
            metrics.update(self._close_evaluation(self._begin(args), metrics))

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self._begin(args).meter.skip()
        self._training = False

    def _close_evaluation(self, peaks: PhasePeaks, metrics: dict[str, Any]) -> dict[str, float]:
        self._evaluating = False
        peaks.close("evaluation")
        prefix = next((key.removesuffix("_runtime") for key in metrics if key.endswith("_runtime")), "eval")
        return _named(f"{prefix}_memory", peaks.take("evaluation")["evaluation"])


def _named(prefix: str, peaks: dict[str, int]) -> dict[str, float]:
    return {f"{prefix}_{kind.removesuffix('_bytes')}_gib": to_gib(size_bytes) for kind, size_bytes in peaks.items()}


def _step_figures(peaks: PhasePeaks) -> dict[str, float]:
    """Return what a log during training says: the phases since the last one, and the moment."""
    figures: dict[str, float] = {}
    for phase, phase_peaks in peaks.take(*PHASES).items():
        figures |= _named(f"memory_{phase}", phase_peaks)
    return figures | _named("memory", _device_used(peaks) | {"process_rss_bytes": read_process()[0]})


def _run_figures(peaks: PhasePeaks) -> dict[str, float]:
    """Return what the closing log says: the phases of the whole run, and the peak of the process."""
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
    """Print in one line how much memory is in use now, on the whole card and by this process.

    Without an accelerator it prints the host's memory and says so. ``device`` is that of ``read_memory``.

    Raises:
        ValueError: there is no such ``device``.
    """
    print(_utilization(read_memory(device)))


def print_summary(result: TrainOutput, device: torch.device | str | int | None = None) -> None:
    """Print time, samples per second and memory of a run; ``result`` is what ``trainer.train()`` returned.

    With a ``MemoryReportCallback`` the peaks of each phase are printed too, then the memory in use now.

    Raises:
        ValueError: ``result`` is not the result of a training run, or there is no such ``device``.
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
        used = "use by all processes not told"
    else:
        used = f"{format_bytes(reading.device_used_bytes)} in use by all processes"
    total = "" if reading.device_total_bytes is None else f" of {format_bytes(reading.device_total_bytes)}"
    allocated, reserved = format_bytes(reading.allocated_bytes or 0), format_bytes(reading.reserved_bytes or 0)
    device_name = f"{reading.device} ({reading.device_name})"
    return f"{device_name}: {used}{total}; torch here: {allocated} allocated, {reserved} reserved"
