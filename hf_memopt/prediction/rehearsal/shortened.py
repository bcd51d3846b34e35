"""Shorten a Trainer's run: a few steps of the longest rows, two batches of its evaluation, and no file.

A training by ``Trainer.train()`` ends inside it, so that nothing after it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import send_to_device
from torch.utils._pytree import tree_leaves
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_pt_utils import EvalLoopContainer

from hf_memopt.prediction.memory.run import MemoryReportCallback
from hf_memopt.prediction.recipes.running.longest_rows import LongestRows
from hf_memopt.prediction.rehearsal.result import Done
from hf_memopt.training.binding import TrainingView
from hf_memopt.training.binding.undo import override_method
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_memopt.prediction.rehearsal.watch import Watch

EVALUATED = 2  # batches
LEAST_KEPT_BYTES = 2**24  # of outputs that an evaluation keeps: less is not worth its time
SINKS = "transformers.integrations"  # the module of W&B's, TensorBoard's and other callbacks; seen in 5.8.1 to 5.23.0
REPORTING = (ProgressCallback, PrinterCallback, MemoryReportCallback)
_OFF = ("eval_on_start", "load_best_model_at_end", "push_to_hub")


class Shortening(TrainerCallback):
    """Shortens every Trainer of a process."""

    def __init__(self, watch: Watch, kind: Any) -> None:
        self._watch, self.longest = watch, LongestRows()
        self._trainer: Trainer | None = None
        self._notes: list[str] = []
        self._outputs: dict[EvalLoopContainer, Any] = {}  # of the last batch
        self._change(kind)

    def notes(self) -> tuple[str, ...]:
        """Return what was changed, and what of the data is unknown."""
        off = ("the Trainer's saving, reporting and pushing were off",) if self._trainer else ()
        return (*self._notes, *filter(None, [self.longest.note]), *off)

    def _change(self, kind: Any) -> None:
        """Change the class: its training, its evaluation, and what it makes on the Hub."""
        train, loop = kind.train, kind.evaluation_loop
        add, get_arrays = EvalLoopContainer.add, cast("Any", EvalLoopContainer.get_arrays)

        def shortened(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin(trainer)
            train(trainer, *args, **kwargs)
            self._end()

        def few(trainer: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            metrics = trainer.compute_metrics
            if metrics is not None and not trainer.args.batch_eval_metrics:
                trainer.compute_metrics = lambda *_: {}  # of values that were not computed
            try:
                with self._watch.during("evaluation"):
                    return loop(trainer, _Few(dataloader, self, trainer), *args, **kwargs)
            finally:
                trainer.compute_metrics = metrics

        def adding(container: Any, tensors: Any) -> None:
            self._outputs[container] = tensors
            add(container, tensors)

        def arrays(container: Any) -> Any:
            if container in self._outputs:  # of all batches they may not fit the host
                last = self._outputs.pop(container)
                container.tensors = last if container.do_nested_concat else [last]
            return get_arrays(container)

        kind.train, kind.evaluation_loop = shortened, few
        kind.init_hf_repo = kind.push_to_hub = lambda *_, **__: None
        EvalLoopContainer.add, EvalLoopContainer.get_arrays = adding, arrays  # type: ignore[assignment,method-assign]
        self._watch.kept_outputs = lambda: tree_leaves([getattr(one, "tensors", None) for one in self._outputs])

    def _begin(self, trainer: Trainer) -> None:
        self._trainer, handler = trainer, trainer.callback_handler
        own = [one for one in handler.callbacks if not isinstance(one, REPORTING)]
        handler.callbacks[:] = [one for one in own if not type(one).__module__.startswith(SINKS)]
        trainer.add_callback(self)
        for name in _OFF:
            setattr(trainer.args, name, False)
        override_method(trainer, "get_train_dataloader", self._reading)
        override_method(trainer, "get_batch_samples", self._batches)
        self._watch.counts_steps = False

    def _end(self) -> None:
        """Evaluate, if there is something to evaluate, and end the script."""
        assert self._trainer is not None
        if self._trainer.eval_dataset is not None:
            self._trainer.evaluate()
        raise Done

    # ---- What the Trainer calls

    def _reading(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader = self.longest.reading(before, *args, **kwargs)
        if self.longest.longest_row is None and not isinstance(getattr(loader, "dataset", None), TrainingView):
            self._notes.append("the lengths of the rows are unknown: the first batches were taken, not the longest")
        return loader

    def _batches(self, before: Callable[..., Any], iterator: Iterator[Any], number: int, *args: Any, **kw: Any) -> Any:
        trainer: Any = self._trainer
        longest = self.longest.batches(trainer._train_batch_size, number)  # private; auto_find_batch_size halves it
        if longest is not None:
            iterator = iter(send_to_device(longest, trainer.args.device))
        return before(iterator, number, *args, **kw)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watch.step_done()
        self.on_epoch_end(args, state, control)
        if self._watch.steps >= self._watch.wanted_steps:
            self._end()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = control.should_save = control.should_evaluate = False

    def keep_all(self, batches: int, trainer: Trainer) -> None:
        """Let an evaluation keep the outputs of all its batches, as it would by now, but for the last."""
        size = sum(one.nbytes for one in tree_leaves(list(self._outputs.values())) if getattr(one, "is_cuda", False))
        batches = min(batches, trainer.args.eval_accumulation_steps or batches)
        if batches <= EVALUATED or size * batches < LEAST_KEPT_BYTES:
            return
        on_gpu = f"{format_bytes(size)} of outputs of each of {batches:,} batches on the GPU"
        self._notes.append(f"the evaluation keeps {on_gpu}: {format_bytes(size * batches)}")
        for _ in range(batches - EVALUATED):
            for container, tensors in list(self._outputs.items()):
                container.add(tensors)


class _Few:
    """Stands for a loader of an evaluation: its longest batches, or its first ones."""

    def __init__(self, loader: Any, shortening: Shortening, trainer: Any) -> None:
        self._loader, self._shortening, self._trainer = loader, shortening, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        longest = LongestRows()
        longest.reading(lambda: self._loader)
        batches = longest.batches(self._trainer.args.eval_batch_size, EVALUATED)
        found = self._loader if batches is None else send_to_device(batches, self._trainer.args.device)
        for number, batch in zip(range(EVALUATED), found, strict=False):
            if number == EVALUATED - 1 and hasattr(self._loader, "__len__"):
                self._shortening.keep_all(len(self._loader), self._trainer)
            yield batch
