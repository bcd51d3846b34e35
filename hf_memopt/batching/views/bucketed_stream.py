"""Bucketing a stream: an ``IterableDataset`` of unknown length, through one bounded buffer.

As many examples as the buffer holds are sorted by padded length and cut into groups (a batch for each process), which
are handed out in random order while the stream fills the gaps with the next ones. So a batch holds neighbours in
length, lengths do not come in waves, and memory is that of ``buffer_examples`` examples whatever the stream. No
boundaries need to be learnt beforehand, and a stream whose lengths drift is followed.

Trade: of 1e5 lognormal lengths (median 60, at most 512) with ``max_tokens=8192``, the share of real tokens is .85, .93,
.94 and .95 with 1024, 4096, 8192 and 32768 examples held, which are read before the first step
(benchmarks/streaming.py).

The order is a pure function of the stream, the seed, the sizes and the number of processes, whatever the number of
workers. Without ``rank`` every process reads the whole stream and hands out its own share of the batches, so that the
batches of one step are neighbours in length; with it a process reads and holds its own share alone, and the processes
draw by the same random numbers, so that the batches of one step are of about the same length. Every DataLoader worker
reads what its process reads: one is enough to read ahead of the training, more share the collation, not the reading.

The state is the place in the stream where the examples held now began to be read, and how many batches were handed out
since: a few hundred bytes, and to resume reads twice the buffer at most, however long the run was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import get_worker_info

from hf_memopt.batching.collation import RowBatch
from hf_memopt.batching.plan import check_batch_limits, check_settings, check_state, checked_boundaries, plain_number
from hf_memopt.batching.views.stream_reading import (
    Entry,
    Place,
    SharedPlaces,
    StreamReader,
    check_source,
    random_numbers,
)
from hf_memopt.batching.views.view import (
    EpochView,
    SharedArray,
    check_per_device,
    check_world_size_of_run,
    take_seed,
    tell_what_a_sample_is,
)
from hf_memopt.binding.undo import UndoHandle, set_attribute, share_attribute, undo_all
from hf_memopt.changes import Change, record_changes
from hf_memopt.plain_data import CountOrZero, check_value

if TYPE_CHECKING:
    from transformers import Trainer

DROPPED, ITERATIONS = 1, 2  # places in the shared memory, of what workers tell their process; 0 is the epoch
ORDER = (
    *("batch_size", "max_tokens", "boundaries", "buffer_examples", "seed", "world_size", "rank", "column"),
    *("pad_to_multiple_of", "too_long", "rows_per_turn"),
)
BUFFER_EXAMPLES = 8192


class BucketedStream(EpochView, torch.utils.data.IterableDataset[Any]):
    """An endless stream of a stream's examples in length-bucketed order: pass after pass, each in another order.

    ``batch_size=``: an item is an example; ``batch_size * world_size`` neighbours are of similar length, and every
    batch is full. ``max_tokens=``: an item is a whole batch (a list of examples), and ``world_size`` neighbours have
    the same number of rows; ``BucketedCollator`` flattens them. Every example of a pass is handed out exactly once;
    what fills no group at the end of a pass opens the next one. The stream ends after a pass that brought no example.
    Each worker of a DataLoader reads the whole source with random numbers of its own, so a source that shuffles has to
    seed that itself (``random.Random(epoch)``).

    A Trainer needs ``max_steps`` and ``attach(trainer)``, and evaluates, saves and logs by steps: the run is one epoch.
    A resumed run reads again what it skips; with ``ignore_data_skip=True`` it goes on where the checkpoint stands. In
    its log a sample of a ``max_tokens=`` stream is a batch.

    Args:
        dataset: a ``datasets.IterableDataset``, a torch ``IterableDataset`` or any iterable of dicts that starts over
            when iterated again. Its ``set_epoch``, if it has one, is called with the number of the pass. In a
            DataLoader worker it is read as if there was none, so it need not share itself out.
        boundaries: ascending limits that batches are made for, instead of their own padded lengths; a batch of
            ``max_tokens=`` is padded to its limit. An example above the last one is too long.
        buffer_examples: examples held at most by each process and each worker, besides the group that is being handed
            out. More of them pad less: 100 batches for each process are a good measure.
        rank: the process that this is, to read its share alone; ``buffer_examples`` are then of that share. Its passes
            may be longer than another's, if its shards are.
        batch_size, max_tokens, seed, world_size, column, pad_to_multiple_of, too_long: see ``bucketed``; ``dropped``
            counts what is too long.

    Raises:
        ValueError: a size below 1, both or neither of ``batch_size`` and ``max_tokens``, a buffer smaller than one
            group, boundaries that do not ascend or fit, a dataset that is split by node already.
        TypeError: the dataset cannot be iterated more than once.

    Examples:
        >>> rows = [{"input_ids": [1] * length} for length in (3, 50, 4, 52, 5, 51)]
        >>> stream = BucketedStream(rows, batch_size=3, buffer_examples=6)
        >>> [len(row["input_ids"]) // 10 for row in itertools.islice(stream, 12)]
        [5, 5, 5, 0, 0, 0, 5, 5, 5, 0, 0, 0]
    """

    limit = "max_tokens"  # in errors

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        boundaries: ArrayLike | None = None,
        buffer_examples: int = BUFFER_EXAMPLES,
        seed: int = 0,
        world_size: int = 1,
        rank: int | None = None,
        column: str = "input_ids",
        pad_to_multiple_of: int = 8,
        too_long: Literal["error", "drop"] = "error",
    ) -> None:
        check_batch_limits(batch_size, max_tokens, 1 if boundaries is not None else pad_to_multiple_of)
        check_source(dataset)
        super().__init__(dataset)
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.buffer_examples, self.seed, self.world_size, self.rank = buffer_examples, seed, world_size, rank
        self.column, self.pad_to_multiple_of = column, pad_to_multiple_of
        self.too_long: str = too_long
        self._check_settings()
        self.boundaries: list[int] | None = None
        if boundaries is not None:
            self.boundaries = checked_boundaries(boundaries, max_tokens).tolist()
        self.rows_per_turn = batch_size  # what a process takes at a time; bind_trainer learns it from the Trainer
        self._leaves_room = False  # for the batches of the other processes, which accelerate cuts out
        self.kept_columns: frozenset[str] | None = None
        self._places = SharedPlaces()
        self.loaded_state: dict[str, Any] | None = None  # where iterations begin
        self._loads = SharedArray(1)  # how many states were loaded; copies in persistent workers lack the later ones
        self._known_loads = 0  # of these, what this copy has
        self._handed_out = (0, 0)  # the number of the latest iteration in this process, and its turns
        self._origin = 0  # the turn that worker 0 began with

    @property
    def has_whole_batches(self) -> bool:
        """Whether an item is a batch, not an example."""
        return self.max_tokens is not None

    @property
    def dropped(self) -> int:
        """How many examples the latest iteration dropped as too long so far, over all its passes."""
        return int(self._shared.values[DROPPED])

    @dropped.setter
    def dropped(self, count: int) -> None:
        self._shared.values[DROPPED] = count

    @property
    def group_examples(self) -> int:
        """The fewest examples that are handed out together: one batch for each process, one row each in token mode."""
        return self._readers * (self.batch_size or 1)

    @property
    def _readers(self) -> int:
        """The processes whose batches are cut from what this one holds."""
        return self.world_size if self.rank is None else 1

    def __iter__(self) -> Iterator[Any]:
        """Hand out the examples or batches; in a DataLoader worker, its turns of them."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self._loads.values[0] != self._known_loads:
            raise RuntimeError(
                "persistent_workers=True keeps copies of the stream that load_state_dict does not reach; expected "
                "workers that began after it. Build the DataLoader again after stream.load_state_dict(state)"
            )
        state = self.loaded_state
        first, origin = (0, 0) if state is None else (state["turn"], state["origin"])
        if number == 0:
            self._shared.values[ITERATIONS] += 1
        iteration = int(self._shared.values[ITERATIONS])
        for turn, rows in self._turns(state, notes=number == 0):
            if turn >= first and (turn - origin) % workers == number:
                self._origin, self._handed_out = origin, (iteration, turn + 1)
                yield from self._between_others(rows)

    # ---- Order ----

    def _turns(self, state: dict[str, Any] | None, *, notes: bool) -> Iterator[tuple[int, list[Any]]]:
        """Yield what all processes take at a time, with its number; from the place of a state on."""
        place = self._first_place() if state is None else state["place"]
        turn = place["turn"]
        if notes:
            self._places.begin(place)
            self.dropped = place["dropped"]
        for group, generator, begins in self._groups(place, notes):
            if begins is not None and notes:
                self._places.add({**begins, "turn": turn})
            for rows in self._deal(group, generator):
                yield turn, rows
                turn += 1

    def _first_place(self) -> Place:
        return {"epoch": self.epoch, "row": 0, "dataset": None, "group": 0, "turn": 0, "dropped": 0}

    def _groups(self, place: Place, notes: bool) -> Iterator[tuple[list[Entry], np.random.Generator, Place | None]]:
        """Yield what the processes read side by side, longest example first, and the random numbers that deal it.

        With the first group of what is held comes the place where the reading of that began.
        """
        reading = StreamReader(self, notes=notes, is_resumed=place["dataset"] is not None)
        capacity = self.buffer_examples // self.group_examples * self.group_examples
        rest: list[Entry] = []  # of the pass before, fewer than a group
        drawn = place["group"]
        for epoch in itertools.count(place["epoch"]):
            reading.begin(place)
            if rest:
                rest += reading.take(self.group_examples - len(rest))
                if len(rest) >= self.group_examples or reading.is_empty:
                    yield sorted(rest, key=lambda entry: entry[:3], reverse=True), self._random(epoch, drawn), None
                    rest, drawn = [], drawn + 1
            ahead_from = reading.place(drawn)
            ahead = [] if rest else reading.take(capacity)
            while ahead:
                # no place says what is carried over from the cut before
                begins: Place | None = None if rest else ahead_from
                groups, rest = self._cut(sorted([*rest, *ahead], key=lambda entry: entry[:3]))
                ahead, ahead_from, reading.taken = [], reading.place(drawn + len(groups)), 0
                while groups:
                    generator = self._random(epoch, drawn)
                    group = groups.pop(int(generator.random() * len(groups)))
                    yield group, generator, begins
                    drawn, begins = drawn + 1, None
                    ahead += reading.take(
                        min(len(group), capacity - reading.taken)
                    )  # so that never more is held than the buffer has room for
            if reading.is_empty:
                break
            place = {**self._first_place(), "epoch": epoch + 1, "dropped": reading.dropped}
            drawn = 0 if self.rank is None else drawn  # one process may be in an earlier pass than another
        if self.rank is not None and drawn == 0:
            raise ValueError(
                f"rank={self.rank} of world_size={self.world_size} has no example in its share of the stream, and the "
                "other processes would wait for it; expected one example or more for each. Leave rank out"
            )

    def _cut(self, held: list[Entry]) -> tuple[list[list[Entry]], list[Entry]]:
        """Return the groups, each with its longest example first, and the examples that fill none.

        The examples ascend; groups are cut from the longest downwards, so that what is left over are the shortest.
        """
        groups, end, readers = [], len(held), self._readers
        while end >= readers:
            size = (self.batch_size or (self.max_tokens or 0) // held[end - 1][0]) * readers
            if self.batch_size is not None and end < size:
                break  # every batch is full
            size = min(size, end - end % readers)
            groups.append(held[end - size : end][::-1])
            end -= size
        return groups, held[:end]

    def _random(self, epoch: int, drawn: int) -> np.random.Generator:
        """Return the random numbers of a group; those of all ranks agree, so that they draw about the same length."""
        return random_numbers(self.seed, epoch if self.rank is None else 0, drawn)

    def _deal(self, group: list[Entry], generator: np.random.Generator) -> Iterator[list[Any]]:
        """Cut a group into turns, what all processes take at a time, and give each process every ``world_size``-th row.

        The rows are sorted, so each process has one of the longest, and all pad to nearly the same length.
        """
        rows, readers = [entry[-1] for entry in group], self._readers
        if self.max_tokens is not None:
            batches = [RowBatch(rows[rank::readers]) for rank in range(min(readers, len(rows)))]
            for batch in batches:
                batch.width = None if self.boundaries is None else group[0][0]
            yield batches
            return
        size = (self.rows_per_turn or 1) * readers
        turns = [rows[start : start + size] for start in range(0, len(rows), size)]
        for i in generator.permutation(len(turns)) if len(rows) == self.group_examples else range(len(turns)):
            yield [row for rank in range(readers) for row in turns[i][rank::readers]]

    def _between_others(self, rows: list[Any]) -> list[Any]:
        """Return the rows of a turn where accelerate cuts this process's out: it skips those before and after them."""
        if not self._leaves_room or self.rank is None:
            return rows
        return [*rows * self.rank, *rows, *rows * (self.world_size - self.rank - 1)]

    # ---- State ----

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """Return where the stream stands, for ``load_state_dict``: JSON of a few hundred bytes.

        The workers of a DataLoader run ahead of the training, so with workers name the batches that were trained on.

        Args:
            position: batches that each process took since the stream began, those before a resume included; None: all
                that this process has read without workers.

        Raises:
            ValueError: ``position`` is not an integer of 0 or more, or None while workers read.
        """
        iteration, turn = self._handed_out
        in_worker = get_worker_info() is not None  # a StatefulDataLoader asks there
        if position is not None:
            check_value("position", position, CountOrZero, 0)
            turn = position
        elif not in_worker and iteration != int(self._shared.values[ITERATIONS]):
            raise ValueError(
                "position=None is unknown where DataLoader workers read the stream; expected the batches that were "
                "trained on. Call stream.state_dict(position=steps)"
            )
        place = self._places.latest(turn) or self._first_place()
        origin = self._origin if in_worker else turn
        return {**self._order(), "turn": turn, "origin": origin, "place": place}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Let each iteration from now on go on where the stream of a state stood; None: from the beginning.

        An attached Trainer does so itself: a run begins at the beginning, or with ``ignore_data_skip=True`` where the
        checkpoint stands that it resumes from.

        Raises:
            ValueError: missing or unknown keys, or a state of other settings; the stream stays as it was.
        """
        if state is not None:
            check_state(state, self._order(), ("turn", "origin", "place"), of="stream")
            place = state["place"]
            check_state(place, {}, Place.__annotations__, of="stream")
            counts = {f"['place'][{name!r}]": value for name, value in place.items() if name != "dataset"}
            for name, value in {"['turn']": state["turn"], "['origin']": state["origin"], **counts}.items():
                check_value(f"state{name}", value, CountOrZero)
            self._places.begin(place)
            self._handed_out = int(self._shared.values[ITERATIONS]), state["turn"]
        self.loaded_state = None if state is None else dict(state)
        if get_worker_info() is None:  # else a StatefulDataLoader loads the copy that is read
            self._known_loads += 1
            self._loads.values[0] = self._known_loads

    def _order(self) -> dict[str, Any]:
        """Return everything that the order depends on, but the dataset and the epoch."""
        return {name: plain_number(getattr(self, name)) for name in ORDER}

    # ---- Settings and the Trainer ----

    def _check_settings(self) -> None:
        names = ("column", "world_size", "buffer_examples", "pad_to_multiple_of", "seed", "too_long")
        check_settings(**{name: getattr(self, name) for name in names})
        check_value("rank", self.rank, Annotated[int, range(self.world_size)] | None, 0)
        if self.buffer_examples < self.group_examples:
            raise ValueError(
                f"buffer_examples={self.buffer_examples} is less than one batch for each of {self.world_size} "
                f"processes; expected {self.group_examples} or more. "
                f"Pass bucketed(..., buffer_examples={100 * self.group_examples})"
            )

    def check_evaluation(self, trainer: Any) -> NoReturn:
        """Raise ValueError: a stream for training never ends; an attached Trainer calls it."""
        raise ValueError(
            "dataset=<BucketedStream> never ends, and neither would the evaluation; expected the dataset itself. "
            "Evaluate or predict stream.dataset"
        )

    def keep_columns(self, names: Iterable[str] | None) -> None:
        """Hand out only these columns, None: all; an attached Trainer calls it when it makes its DataLoader."""
        self.kept_columns = None if names is None else frozenset(names)

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Let every process read the stream for itself, and check the Trainer's arguments; ``attach`` calls it.

        Stock reads a stream in the first process and cuts each batch up for the others, so unequal batches crash. The
        accelerator's ``dispatch_batches`` is read when the DataLoader is prepared, so it is in time here.

        Raises:
            ValueError: arguments or collator do not fit the stream.
        """
        check_world_size_of_run(trainer, self.world_size, of="bucketed stream")
        for name in ("dispatch_batches", "split_batches"):
            if getattr(trainer.args.accelerator_config, name):
                raise ValueError(
                    f"accelerator_config.{name}=True would cut the batches of the bucketed stream up; expected False. "
                    f'Pass TrainingArguments(..., accelerator_config={{"{name}": False}})'
                )
        for name in ("eval", "save", "logging"):
            if getattr(trainer.args, f"{name}_strategy") == "epoch":
                raise ValueError(
                    f"{name}_strategy='epoch' waits for the end of an epoch, which the endless bucketed stream reaches "
                    f"with that of the run; expected 'steps'. Pass TrainingArguments(..., {name}_strategy='steps', "
                    f"{name}_steps=500)"
                )
        pads = self.boundaries is None and self.limit == "max_tokens"
        padded_to = self.pad_to_multiple_of if pads else None
        check_per_device(trainer, self.batch_size, of="bucketed stream", padded_to=padded_to)
        handles = [take_seed(trainer, self, may_change=self.takes_seed, of="bucketed stream")]
        if self.rank is not None:
            if trainer.args.process_index != self.rank:
                raise ValueError(
                    f"rank={self.rank} of the bucketed stream is not this process's {trainer.args.process_index}, so "
                    "the share of one process would be read twice; expected the rank of the run. "
                    'Pass bucketed(..., rank=int(os.environ["RANK"]))'
                )
            handles.append(share_attribute(self, "_leaves_room", True))
        if self.batch_size is not None:
            rows = trainer.args.per_device_train_batch_size
            handles.append(share_attribute(self, "rows_per_turn", rows, trainer))
        else:
            tell_what_a_sample_is(trainer)
        config = trainer.accelerator.dataloader_config
        if config.dispatch_batches is not False:
            reason = "each process reads the stream for itself: stock would cut up batches of the first one for all"
            name = "accelerator_config.dispatch_batches"
            record_changes(trainer, [Change(name, config.dispatch_batches, False, reason)])
            handles.append(set_attribute(config, "dispatch_batches", False))
        from hf_memopt.batching.views.stream_checkpoint import keep_in_checkpoints  # imports transformers

        handles += [keep_in_checkpoints(trainer, self), share_attribute(self, "is_bound", True)]
        return undo_all(*handles)
