"""What ``hf-memopt run`` does around one ``train()``: a prediction before, a watch meanwhile, lines to keep after.

Attached are micro-batching, which acts when memory runs out, and the guard of evaluations: the batch, its loss and all
weights stay what they are without them, and so does what is logged. What a Trainer cannot have is left out, with the
reason.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import TrainerCallback

from hf_memopt.errors import reason
from hf_memopt.prediction.memory import FOR_ONE_GPU, estimate_of
from hf_memopt.prediction.memory.settings import BatchShape
from hf_memopt.prediction.recipes.running.longest_rows import LongestRows
from hf_memopt.technique_list import TECHNIQUES, load
from hf_memopt.training.binding import attach
from hf_memopt.training.binding.compatibility import refusals_of, techniques_in_use
from hf_memopt.training.binding.losses import ignores_items, repair_gradient_scale
from hf_memopt.training.binding.undo import override_method, remove_all
from hf_memopt.training.devices import current_gpu, find_gpu
from hf_memopt.training.techniques.freezing import FreezeCallback
from hf_memopt.units import format_bytes, format_duration

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_memopt.prediction.memory import Estimate

ALWAYS = ("micro-batching", "evaluation guard")
EXACT: tuple[tuple[str, ...], ...] = (
    ("fused cross-entropy",),
    ("checkpointing policy",),
    ("fused cross-entropy", "checkpointing policy"),
)
"""What ``--apply exact`` tries in this order: the same batch, and the same loss but for the order of sums."""
ALLOWED = {
    "release_clipping": "max_grad_norm=0, optimizer_cls_and_kwargs=low_memory_optimizer(args, model, release=True)",
    "bf16_weights": "model.to(torch.bfloat16), "
    'optimizer_cls_and_kwargs=low_memory_optimizer(args, model, rounding="stochastic")',
    "freeze": 'callbacks=[FreezeCallback("embeddings")]',
}
"""What ``--allow`` takes, as a script would write it."""
BOTH = (
    "model.to(torch.bfloat16), max_grad_norm=0, "
    'optimizer_cls_and_kwargs=low_memory_optimizer(args, model, release=True, rounding="stochastic")'
)
"""The same for the two words that make one optimizer together."""
SECONDS_BETWEEN = 30.0  # two lines of a run


@contextmanager
def assisted(trainer: Trainer, script: str, options: dict[str, Any], say: Callable[..., None]) -> Iterator[None]:
    watch = _Watch(trainer, options["gpu"], say)
    used = [*ALWAYS, *(watch.changes_that_fit() if options["apply"] else ())]
    allowed = watch.allow(options["allow"])
    handles = [override_method(trainer, "training_step", watch.training_step)]
    if options["repair"]:
        handles.append(repair_gradient_scale(trainer))
    trainer.add_callback(watch)
    added = []
    if (count := trainer.args.n_gpu) > 1:
        say(
            f"nothing is attached: {count} GPUs in one process. Call: torchrun --nproc_per_node={count} -m hf_memopt "
            f"run {script}, or with one GPU: CUDA_VISIBLE_DEVICES=0 hf-memopt run {script}"
        )
        used = []
    for name in used:
        if name in techniques_in_use(trainer):
            continue  # the script's own
        callback = load(TECHNIQUES[name].callback)()
        try:
            attach(trainer, callback)
        except (ValueError, TypeError, RuntimeError) as error:
            say(f"without {type(callback).__name__}: {reason(error)}")
        else:
            added.append(callback)
    try:
        yield
    finally:
        watch.say_what_was_done(added)
        trainer.remove_callback(watch)
        remove_all(handles)
        _say_lines(script, options, added, say)
        if added and not options["repair"] and _is_repaired_by_attach(trainer):
            cause = "where a loss ignores num_items_in_batch, which this run did not; --repair gradient-scale does"
            say(f"attach also repairs the gradient scale {cause}")
        both = [word for word in allowed if "optimizer" in ALLOWED[word]]
        lines = {word: ALLOWED[word] for word in allowed}
        if len(both) > 1:
            lines = {word: text for word, text in lines.items() if word not in both} | {" and ".join(both): BOTH}
        for words, text in lines.items():
            say(f"and for {words}, where the Trainer is made: {text}")


class _Watch(TrainerCallback):
    """Predicts before the first step, warns of longer batches, and says how far a run is."""

    keeps_gradient_scale = True  # see ``binding.attachment``

    def __init__(self, trainer: Trainer, gpu: str | None, say: Callable[[str], None]) -> None:
        self._trainer, self._say = trainer, say
        self._gpu = current_gpu() if gpu is None else find_gpu(gpu)
        self._shape = _longest_batch(trainer)
        micro_batching = load(TECHNIQUES["micro-batching"].callback)()
        self._cuts = trainer.args.n_gpu <= 1 and not refusals_of(trainer, micro_batching)
        self._predicted: Estimate | None = None
        self._changes: dict[str, Any] = {}  # of the estimate, by what is attached
        self._has_begun, self._began, self._told, self._first_step = False, 0.0, 0.0, 0
        if self._gpu is None:
            self._say("no GPU here, so nothing is predicted; --gpu NAME predicts for one")
        elif self._shape is not None:
            self._predict(self._shape)

    def _predict(self, shape: BatchShape) -> None:
        try:
            self._predicted = estimate_of(self._trainer, shape, gpu=self._gpu, **self._changes)
        except Exception as error:  # of foreign code: the script runs without a prediction
            self._say(f"not predicted: {reason(error)}")
            return
        self._say(f"{self._what(shape)} {'needs' if shape.rows == 1 else 'need'} {self._needs(self._predicted)}")
        for note in self._predicted.notes:
            if note.startswith(FOR_ONE_GPU):
                self._say(note)

    def _needs(self, found: Estimate) -> str:
        assert found.gpu is not None
        needs = f"{format_bytes(found.total_bytes)} of {format_bytes(found.gpu.usable_bytes)} on {found.gpu.name}"
        if found.verdict == "over" and self._cuts:
            return f"{needs}: steps will be cut, each with the loss of its whole batch"
        return f"{needs}: {found.verdict}"

    @staticmethod
    def _what(shape: BatchShape) -> str:
        return f"{shape.rows} example{'s' * (shape.rows != 1)}" + (
            "" if shape.seq_len is None else f" of {shape.seq_len} tokens"
        )

    def changes_that_fit(self) -> tuple[str, ...]:
        """Return the first of ``EXACT`` with which the predicted step fits, or that needs least; nothing if it fits."""
        before = self._predicted
        if before is None or self._shape is None or before.verdict == "fits":
            return ()
        found: list[tuple[Estimate, tuple[str, ...], dict[str, Any]]] = [(before, (), {})]
        for names in EXACT:
            changes = {field: value for name in names for field, value in TECHNIQUES[name].sets.items()}
            try:
                found.append((estimate_of(self._trainer, self._shape, gpu=self._gpu, **changes), names, changes))
            except Exception:  # of foreign code
                continue
            if found[-1][0].verdict == "fits":
                break
        self._predicted, names, self._changes = min(found, key=lambda one: one[0].total_bytes)
        if names:
            self._say(f"with {' and '.join(names)} the same batch and loss need {self._needs(self._predicted)}")
        return names

    def allow(self, words: Sequence[str]) -> list[str]:
        """Change the training by these words, one after the other, until a step fits; return those that were used."""
        used: list[str] = []
        for word in words:
            if self._predicted is None or self._shape is None or self._predicted.verdict == "fits":
                break
            try:
                _change_training(self._trainer, word, used)
            except (ValueError, TypeError, RuntimeError) as error:
                self._say(f"without {word}: {reason(error)}")
            else:
                used.append(word)
                self._say(f"--allow {word}, which changes the training:")
                self._predict(self._shape)
        return used

    def training_step(self, before: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        shape = BatchShape.of(inputs, count_tokens=False)
        if not self._has_begun:
            self._has_begun = True
            if self._gpu is not None and self._shape is None:
                self._shape = shape
                self._predict(shape)
        elif self._shape is not None and shape.padded_tokens > self._shape.padded_tokens:
            self._say(f"{self._what(shape)}: larger than any batch before ({self._what(self._shape)})")
            self._shape = shape
        return before(model, inputs, *args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = self._told = time.monotonic()
        self._first_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how far the run is, twice a minute at most."""
        now, done = time.monotonic(), state.global_step - self._first_step
        if now - self._told < SECONDS_BETWEEN or not done:
            return
        self._told = now
        left = state.max_steps - state.global_step
        self._say(
            f"step {state.global_step} of {state.max_steps}, {format_duration(left * (now - self._began) / done)} left"
            f"{self._peaks()}"
        )

    def _peaks(self) -> str:
        measured = self._measured_bytes()
        parts = [f"{format_bytes(measured)} measured"] if measured else []
        if self._predicted is not None:
            parts.append(f"{format_bytes(self._predicted.total_bytes)} predicted")
        return f"; peak {', '.join(parts)}" if parts else ""

    def _measured_bytes(self) -> int:
        device = self._trainer.args.device
        if device.type == "cpu":
            return 0
        reserved: int = torch.get_device_module(device).max_memory_reserved(device)  # of the script's own counters
        return reserved + ((self._gpu.context_bytes or 0) if self._gpu is not None else 0)

    def say_what_was_done(self, added: list[Any]) -> None:
        tally: Any = next((one.tally for one in added if hasattr(one, "tally")), None)
        if tally is not None and tally.failures:
            self._say(
                f"memory ran out {'once' if tally.failures == 1 else f'{tally.failures} times'}; {tally.cut_steps} of "
                f"{tally.steps} steps ran in parts, with the loss and gradients of the whole batch up to rounding and "
                "dropout's draws"
            )
        if peaks := self._peaks():
            self._say(f"the run is over{peaks}")


def _change_training(trainer: Trainer, word: str, used: Sequence[str]) -> None:
    """Do what a word of ``--allow`` names beside those that are used, before the optimizer is made."""
    args, model = trainer.args, cast(nn.Module, trainer.model)
    if word == "freeze":
        attach(trainer, FreezeCallback("embeddings"))
        return
    asked = [one for one in TECHNIQUES.values() if one.optimizer and one.consent in (*used, word)]
    is_own = trainer.optimizer_cls_and_kwargs is not None and len(asked) == 1  # else the other word made it
    if trainer.optimizer is not None or is_own:
        raise ValueError(
            f"the script makes its own optimizer; expected that of TrainingArguments. Leave --allow {word} out"
        )
    sets = {name: value for one in asked for name, value in one.sets.items()}
    norm = args.max_grad_norm
    args.max_grad_norm = 0.0 if "release_clipping" in (*used, word) else norm
    try:
        options = {"release": "gradient_release" in sets, "rounding": sets.get("rounding", "nearest")}
        made = load(asked[0].optimizer)(args, model, **options)
    except (ValueError, TypeError, RuntimeError):
        args.max_grad_norm = norm
        raise
    if dtype := sets.get("weights_dtype"):
        nn.Module.to(model, getattr(torch, dtype))
    trainer.optimizer_cls_and_kwargs = made


def _is_repaired_by_attach(trainer: Trainer) -> bool:
    """Return whether ``attach`` would divide by accumulation steps, or would look in the first step whether it has to.

    After the run, in which a classification head has noted the type of its labels.
    """
    factor = trainer.args.gradient_accumulation_steps * trainer.args.world_size
    return factor > 1 and ignores_items(trainer) is not False


def _longest_batch(trainer: Trainer) -> BatchShape | None:
    """Return a batch of the longest rows; None where looking at them might draw random numbers."""
    dataset: Any = trainer.train_dataset
    has_table = hasattr(getattr(dataset, "data", None), "table")
    is_stored = isinstance(dataset, list) or (has_table and dataset.format["type"] != "custom")
    lengths = LongestRows().lengths(dataset) if is_stored else None
    if lengths is None or not len(lengths):
        return None
    processes = trainer.args.world_size if trainer.accelerator.split_batches else 1
    rows = min(trainer.args.train_batch_size // processes, len(lengths))
    return BatchShape(rows, int(lengths.max()), None, None)


def _say_lines(script: str, options: dict[str, Any], added: list[TrainerCallback], say: Callable[..., None]) -> None:
    if not added:
        return
    names = [type(one).__name__ for one in added]
    found = None if options["is_module"] else diff_of(script, names, options["folder"])
    say("to have the same without hf-memopt run:" if found is None else f"the same as a change of {script}:")
    say(lines_of(names) if found is None else found, "")


# ---- The lines by which a script does the same itself


def lines_of(callbacks: Sequence[str], trainer: str = "trainer") -> str:
    """Return the import and the call.

    Examples:
        >>> print(lines_of(["MicrobatchCallback"]))
        from hf_memopt import MicrobatchCallback, attach
        attach(trainer, MicrobatchCallback())
    """
    names = ", ".join([*sorted(callbacks), "attach"])
    return f"from hf_memopt import {names}\nattach({trainer}, {', '.join(f'{name}()' for name in callbacks)})"


def diff_of(script: str, callbacks: Sequence[str], folder: str = ".") -> str | None:
    """Return a diff that attaches callbacks before the script trains; None where no ``trainer.train()`` is found."""
    try:
        with tokenize.open(Path(folder, script)) as file:  # in the encoding that the script states
            text = file.read()
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):  # it is gone, or was changed to what cannot be read
        return None
    lines, found = text.splitlines(keepends=True), next(_trainings(tree), None)
    if found is None:
        return None
    statement, name = found
    added, call = lines_of(callbacks, name).splitlines()
    line = lines[statement.lineno - 1]
    indent = line[: len(line) - len(line.lstrip())]
    if len(indent.encode()) != statement.col_offset:
        return None  # something stands before it on its line
    imports = [
        one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom) and one.lineno < statement.lineno
    ]
    has_text = ast.get_docstring(tree) is not None
    first = tree.body[0].end_lineno or 0 if has_text else len([*itertools.takewhile(lambda one: one[0] == "#", lines)])
    after = max((one.end_lineno or 0 for one in imports), default=first)
    changed = list(lines)
    changed.insert(statement.lineno - 1, f"{indent}{call}\n")
    changed.insert(after, f"{added}\n")
    return "".join(difflib.unified_diff(lines, changed, f"a/{script}", f"b/{script}"))


def _trainings(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield statements that call ``train()`` of a name to which something called a Trainer was assigned."""
    names = {
        target.id
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)
        for target in one.targets
        if isinstance(target, ast.Name) and ast.unparse(one.value.func).endswith("Trainer")
    }
    whole = (ast.Expr, ast.Assign, ast.Return, ast.AnnAssign)  # which hold no other statements
    statements = [one for one in ast.walk(tree) if isinstance(one, whole)]
    for one in sorted(statements, key=lambda statement: statement.lineno):
        for call in ast.walk(one):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="train")) if name in names:
                    yield one, name
