"""``Plan``: what ``plan`` found, as a table, JSON, a training script and a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any

from hf_memopt.plain_data import check_value, checked_path

if TYPE_CHECKING:
    import os

    from hf_memopt.prediction.recipes import Recipe
    from hf_memopt.prediction.recipes.planning.model_and_rows import Texts
    from hf_memopt.prediction.recipes.planning.nearest import Shortfall
    from hf_memopt.prediction.recipes.planning.script import RowsFile, Written
    from hf_memopt.prediction.recipes.planning.simulated import Candidate, Simulation
    from hf_memopt.training.devices import Gpu


@dataclass(frozen=True, eq=False)
class Plan:
    """The result of ``plan``.

    Attributes:
        model: its display name.
        parameters: elements of all parameters.
        gpu: with what is usable of it: the budget, if there was one.
        goal: "speed", "memory" or "longest".
        method: that was asked for.
        allow: the words of consent that were given.
        effective_batch_size: examples of an optimizer step.
        texts: the lengths it is planned for.
        candidates: every set-up that was simulated, each with its reason.
        chosen: the best of them; None where none fits.
        shortfall: where none fits, what is missing and what would fit; None otherwise.
        notes: what was decided or assumed.
        simulations: how many there were, those of shorter rows included.
        source: what ``from_pretrained`` takes for the model; None for a module or configuration without a name.
        task: of the model's head; None for one that is unknown.
        simulation: simulates more of the same model, for reports; None for a plan without one.
        command: what made it, for reports and scripts; "" for a call of ``plan``.
        rows: the file of its rows, for the script; None for a call of ``plan``.
        system: the word of ``os`` that was asked for; None for none.
        passed_over: why full fine-tuning, or LoRA, was not chosen; "" where nothing was passed over.
        task_note: a sentence on the task, where the rows and the model or ``--task`` do not agree on it; "" elsewhere.
    """

    model: str
    parameters: int
    gpu: Gpu
    goal: str
    method: str
    allow: tuple[str, ...]
    effective_batch_size: int
    texts: Texts = field(repr=False)
    candidates: tuple[Candidate, ...] = field(repr=False)
    chosen: Candidate | None
    shortfall: Shortfall | None = None
    notes: tuple[str, ...] = ()
    simulations: int = 0
    source: str | None = None
    task: str | None = None
    simulation: Simulation | None = field(default=None, repr=False)
    command: str = ""
    rows: RowsFile | None = None
    system: str | None = None
    asked: Mapping[str, Any] = field(default_factory=dict, repr=False)
    task_note: str = ""
    passed_over: str = ""

    @property
    def fits(self) -> bool:
        """Whether a set-up was found."""
        return self.chosen is not None

    @property
    def recipe(self) -> Recipe:
        """The chosen recipe, with the reason for every choice.

        Raises:
            ValueError: none fits.
        """
        if self.chosen is None:
            raise ValueError(
                f"model=<{self.model}> has no plan that fits {self.gpu.name}; expected one that does. "
                "See what would fit: print(plan)"
            )
        return self.chosen.recipe

    def table(self, width: int = 80, *, verbose: bool = False) -> str:
        """Return the plan as text of at most ``width`` columns; ``verbose`` shows every row and note worth a look."""
        from hf_memopt.prediction.recipes.planning.output import plan_text

        check_value("width", width, Annotated[int, range(1, 10**4)], 80)
        check_value("verbose", verbose, bool, False)
        return plan_text(self, width, verbose=verbose)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What a report shows beside the candidates, simulated when it is first asked for; see ``report_figures``."""
        from hf_memopt.prediction.recipes.planning.report_figures import report_figures

        return report_figures(self)

    def to_json(self, *, figures: bool = False) -> str:
        """Return everything as JSON text, of which ``hf-memopt report FILE`` makes a page.

        Args:
            figures: whether to simulate what else a report shows: which batches and lengths fit, and the timeline.
        """
        from hf_memopt.prediction.recipes.planning.output import plan_json

        check_value("figures", figures, bool, False)
        return plan_json(self, figures=figures)

    def write(
        self,
        directory: str | os.PathLike[str],
        force: bool = False,
        *,
        data: str | os.PathLike[str] | None = None,
        column: str | None = None,
        tokenizer: str | None = None,
        field: str | None = None,
    ) -> Written:
        """Write ``train.py``, the training script of the chosen recipe, and ``recipe.json``, the recipe itself.

        Args:
            directory: made if it does not exist.
            force: whether files of these names are overwritten.
            data: the file or folder of rows that the script reads: Parquet, Arrow, JSON, CSV or TSV. None for that
                of the plan, if it was made for one.
            column: of it, with texts or token ids; None for the likely one.
            tokenizer: a folder or a name on the Hub; None for the model's own.
            field: of the JSON object that the file is, which holds the rows.

        Returns:
            The paths, the commands to run next, and what the script leaves to be completed.

        Raises:
            ValueError: none fits; the folder has such files already; the data has no such column.
            OSError: a file cannot be written.
        """
        from hf_memopt.prediction.recipes.planning.script import RowsFile, write_plan

        check_value("force", force, bool, False)
        rows = self.rows if data is None else RowsFile(checked_path("data", data), column, tokenizer, field)
        return write_plan(self, directory, force=force, rows=rows)

    def script(self) -> str | None:
        """Return the training script of the chosen recipe; None where there is none for the model's task.

        Raises:
            ValueError: none fits.
        """
        from hf_memopt.prediction.recipes.planning.script import script_of

        return script_of(self, self.rows)[0]

    def report(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the plan as one HTML file with pictures, which needs no network.

        Args:
            path: a file that ends in .html.
            force: whether a file at ``path`` is replaced.

        Raises:
            ValueError: ``path`` cannot be written, or is there already.
        """
        from hf_memopt.prediction.reports import check_page, write_page
        from hf_memopt.prediction.reports.plan import plan_page, read_plan_text

        check_page(path, force=force)
        write_page(plan_page(read_plan_text(self.to_json(figures=True), "Plan.to_json()")), path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the set-ups against the GPU, and which batches and lengths fit, to a PNG, SVG or PDF file.

        Raises:
            ValueError: ``path`` is not such a file that can be written.
            MissingExtraError: matplotlib is not installed.
        """
        from hf_memopt.plotting import check_picture
        from hf_memopt.prediction.reports.plan import draw_plan, read_plan_text

        picture = checked_path("path", path)
        check_picture(picture, purpose="the picture of a plan", name="path")  # before what it shows is simulated
        draw_plan(read_plan_text(self.to_json(figures=True), "Plan.to_json()"), picture)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        from hf_memopt.prediction.recipes.planning.output import print_plan
        from hf_memopt.terminal import printed_html

        return printed_html(partial(print_plan, self))
