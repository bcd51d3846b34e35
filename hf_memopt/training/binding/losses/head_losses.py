"""Read how the head of a transformers model makes its loss, from the source of its ``forward``.

Every statement that assigns the loss has to be one of ``known_statements.csv``, those of transformers 5.8.1 to
5.23.0: a call of ``self.loss_function`` with a loss of ``transformers.loss``, or a cross entropy, squared error or CTC
written out. What adds to it (the loss of a router, a penalty on logits) has to hang on a setting that is off. Any other
head is not known, so a head that changes in a later version is not mistaken for what it was.

Limitations: what lies before the loss is not read. That rows do not meet there (batch norms, experts of limited
capacity) is for those who cut the batch to see to.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

from torch import nn

from hf_memopt.plain_data import packaged_rows
from hf_memopt.training.binding.losses.row_weights import CLASSES, POSITIONS

_ROWS = packaged_rows("hf_memopt.training.binding.losses", "known_statements.csv")


def known(kind: str) -> dict[str, str]:
    """Return the statements of a kind that are known, each with what it means."""
    return {row["text"]: row["means"] for row in _ROWS if row["kind"] == kind}


# Of transformers.loss: what one mean is over, and whether num_items_in_batch divides a sum instead.
LOSS_FUNCTIONS = known("loss function")
TESTS = known("test")  # around a loss, which choose among the losses of a classification head, or ask for labels
SWITCHES = known("switch")  # tests around what adds to a loss, and the setting that is off where the test is false
CROSS_ENTROPIES, OF_EACH_ELEMENT = known("cross entropy"), known("loss of each element")
SHIFTED, UNSHIFTED = known("shifted labels").keys(), known("labels").keys()
ANSWERS, CTC = ({name: text for text, name in known(kind).items()} for kind in ("loss of answers", "ctc"))
# Blocks `if labels is not None:` read as a whole, by their digest: of DebertaForSequenceClassification and V2's.
BLOCKS = known("block")


@dataclass(frozen=True, slots=True)
class Head:
    """What the statements of a ``forward`` say about its loss."""

    # what the mean is over: "labels", "shifted labels", `CLASSES`, `POSITIONS`, "ctc" (by the reduction of the config)
    over: str
    counts: bool  # whether `num_items_in_batch` reaches a loss that divides by it
    source: str  # where this stands
    calls: bool = False  # whether `self.loss_function` decides, which is read from the model
    off: tuple[str, ...] = ()  # settings that have to be off
    module: str = ""  # the attribute of the model that is its cross entropy, "" if there is none


def head_loss(model: Any, forward: Callable[..., Any]) -> Head | str:
    """Return how a model makes its loss, or why that is not known."""
    head = _read(forward)
    if isinstance(head, str):
        return head
    config = getattr(model, "config", None)
    for name in head.off:
        text = getattr(config, "text_config", None)
        if any(getattr(owner, name, None) for owner in (model, config, text)):
            return f"its {name} may add to the loss"
    if head.module and not _is_plain_cross_entropy(getattr(model, head.module, None)):
        return f"its {head.module} is not a plain cross entropy"
    if not head.calls:
        return head
    function = getattr(model, "loss_function", None)
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", "")
    if name not in LOSS_FUNCTIONS or not module.startswith("transformers.loss."):
        return f"its loss_function is {module}.{name}"
    over, _, divides = LOSS_FUNCTIONS[name].partition("; ")
    if head.over and over != "shifted labels":
        return f"its {name} gets shifted labels"
    source = f"{module.replace('.', '/')}.py, {name}, called in {head.source}"
    return replace(head, over=head.over or over, counts=head.counts and bool(divides), source=source)


def assigned(function: Callable[..., Any], name: str) -> set[str]:
    """Return the right sides of all assignments to a name in a function, as text."""
    walk = _walk(_tree(function).body, ())
    return {text for statement, _ in walk for target, text, _ in _assignments(statement) if target == name}


@cache
def _read(forward: Callable[..., Any]) -> Head | str:
    """Return what the statements of a forward say, or the first one that is not known."""
    try:
        tree = _tree(forward)
    except (OSError, TypeError, SyntaxError, StopIteration) as error:
        return f"its source cannot be read ({type(error).__name__})"
    place = f"{forward.__module__.replace('.', '/')}.py, {forward.__qualname__}"
    statements = list(_walk(tree.body, ()))
    returned = [one.value for one, _ in statements if isinstance(one, ast.Return) and isinstance(one.value, ast.Call)]
    names = {_text(keyword.value) for call in returned for keyword in call.keywords if keyword.arg == "loss"}
    if len(names) != 1:
        return f"it returns {' or '.join(sorted(names)) or 'no loss'}"
    (loss,) = names
    read = _Reading(loss, "" if tree.args.kwarg is None else tree.args.kwarg.arg)
    for statement, tests in statements:
        if (reason := read.take(statement, tests)) is not None:
            return f"{place}: {reason}"
    head = read.head(place)
    if head is not None and head.counts and "pop('num_items_in_batch'" in ast.unparse(tree):
        return f"{place} takes num_items_in_batch for itself"
    return head or f"{place} assigns no loss"


class _Reading:
    """Takes the statements of a forward in their order."""

    def __init__(self, loss: str, rest: str) -> None:
        self._loss, self._rest = loss, rest  # the names of the loss and of **kwargs
        self._values: dict[str, str] = {}  # of each name the last one, as text
        self._shifted: set[str] = set()  # all that shift_labels may be
        self._found: dict[tuple[str, bool, bool], str] = {}  # (over, counts, calls) and the statement
        self._off: dict[str, None] = {}
        self._module = ""

    def take(self, statement: ast.stmt, tests: tuple[str, ...]) -> str | None:
        """Return the statement if it is not known."""
        if isinstance(statement, ast.If) and (over := BLOCKS.get(_digest(statement))) is not None:
            self._found[over, False, False] = "if labels is not None: ..."
        for target, text, value in _assignments(statement):
            switch = next((SWITCHES[test] for test in tests if test in SWITCHES), None)
            if target in (self._loss, "labels") and switch is not None:
                self._off[switch] = None
            elif target == "labels" and text != "labels":
                return f"labels = {text}"
            elif target == self._rest and not text.startswith(f"a part of {target}['"):
                return f"{target} = {text}"
            elif target == self._loss and text != "None":
                known = None if any(test.removeprefix("not ") not in TESTS for test in tests) else self._kind(value)
                if known is None:
                    return f"{target} = {text}"
                self._found.setdefault(known, ast.unparse(statement))
            self._values[target] = text
            if target == "shift_labels" and text != target:
                self._shifted.add(text)
        return None

    def head(self, place: str) -> Head | None:
        """Return what was found."""
        overs = {over for over, _, _ in self._found}
        if not overs or overs == {"elements"} or (len(self._found) > 1 and overs != {"labels", "elements"}):
            return None
        over, counts, calls = next(iter(self._found))
        source = f"{place}: {next(iter(self._found.values()))}"
        return Head(CLASSES if len(overs) > 1 else over, counts, source, calls, tuple(self._off), self._module)

    def _kind(self, value: ast.expr | None) -> tuple[str, bool, bool] | None:
        """Return what a loss is over, whether it counts items, and whether the model's loss function decides."""
        if value is None:
            return None
        if _text(value) == "(start_loss + end_loss) / 2":
            return (POSITIONS, False, False) if ANSWERS.items() <= self._values.items() else None
        if not isinstance(value, ast.Call):
            return None
        callee, given = _text(value.func), [_text(argument) for argument in value.args]
        named = {keyword.arg: _text(keyword.value) for keyword in value.keywords}
        if callee == "self.loss_function":
            return self._kind_of_call(given, named)
        if callee == "functional.ctc_loss":
            is_reduced = named.get("reduction") == "self.config.ctc_loss_reduction"
            is_given = CTC.items() <= self._values.items() and given[:2] == ["log_probs", "flattened_targets"]
            return ("ctc", False, False) if is_reduced and is_given else None
        if len(given) != 2 or named:
            return None
        if callee.startswith("self."):
            self._module, made = callee.removeprefix("self."), "CrossEntropyLoss()"
        else:
            made = "CrossEntropyLoss()" if callee == "functional.cross_entropy" else self._values.get(callee, "")
        if made in OF_EACH_ELEMENT and given[1] == "labels":
            return "elements", False, False
        if made not in CROSS_ENTROPIES:
            return None
        over = self._over(given[1])
        return None if over is None else (over, False, False)

    def _kind_of_call(self, given: list[str], named: dict[str | None, str]) -> tuple[str, bool, bool] | None:
        """Return the same of a call of ``self.loss_function``."""
        if named.get(None, self._rest) != self._rest:
            return None
        counts = None in named or "num_items_in_batch" in named
        if "start_positions" in (*given, *named.values()):
            return "", counts, True
        if "shift_labels" in named:
            over = self._over(named["shift_labels"])
            return None if over is None or named.get("labels") not in ("None", "labels") else (over, counts, True)
        others = [text for name, text in (*enumerate(given), *named.items()) if name is not None]
        mentions = [text for text in others if "label" in text and text not in ("labels", "self.num_labels")]
        return ("", counts, True) if "labels" in others and not mentions else None

    def _over(self, labels: str) -> str | None:
        """Return what a cross entropy of these labels is over."""
        texts = self._shifted if labels == "shift_labels" else {labels}
        if texts and texts <= UNSHIFTED:
            return "labels"
        return "shifted labels" if texts and texts <= SHIFTED else None


# ---- Source ---------------------------------------------------------------------------------------------------------


def _tree(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _walk(body: list[ast.stmt], tests: tuple[str, ...]) -> Iterator[tuple[ast.stmt, tuple[str, ...]]]:
    """Yield all statements in their order, each with the tests that it hangs on."""
    for statement in body:
        yield statement, tests
        if isinstance(statement, ast.If) and _digest(statement) not in BLOCKS:
            test = ast.unparse(statement.test)
            yield from _walk(statement.body, (*tests, test))
            yield from _walk(statement.orelse, (*tests, f"not {test}"))
        elif isinstance(statement, ast.With):
            yield from _walk(statement.body, tests)
        elif not isinstance(statement, ast.If):  # loops and the like, in which no known loss is made
            inner = (node for node in ast.walk(statement) if isinstance(node, ast.stmt) and node is not statement)
            yield from ((node, (*tests, type(statement).__name__)) for node in inner)


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, str, ast.expr | None]]:
    """Yield each name that a statement assigns, and what, as text and as it is.

    The latter is None where the name gets a part of something, or what it stands for is changed in place.
    """
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, _text(statement.value), statement.value
            else:
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                yield from ((_root(part), f"a part of {ast.unparse(statement)}", None) for part in parts)
    elif isinstance(statement, ast.AugAssign):
        yield _root(statement.target), f"a sum with {_text(statement.value)}", None
    elif isinstance(statement, ast.For):
        yield from ((node.id, "each", None) for node in ast.walk(statement.target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.Expr):
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        methods = [call.func for call in calls if isinstance(call.func, ast.Attribute)]
        yield from ((_root(each), ast.unparse(statement), None) for each in methods if each.attr.endswith("_"))
    if not hasattr(statement, "body"):
        named = (node for node in ast.walk(statement) if isinstance(node, ast.NamedExpr))
        yield from ((node.target.id, ast.unparse(node), None) for node in named)


def _root(target: ast.expr) -> str:
    """Return the name of which a target is a part: x of x[0] and of x.y."""
    while isinstance(target, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
        target = target.func if isinstance(target, ast.Call) else target.value
    return target.id if isinstance(target, ast.Name) else ""


class _Plain(ast.NodeTransformer):
    """Takes out what changes no value: shapes, devices, dtypes, the name of a module."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        shapes = ("to", "view", "reshape", "contiguous", "squeeze", "float")
        is_shape = isinstance(node.func, ast.Attribute) and node.func.attr in shapes
        return node.func.value if is_shape else node  # type: ignore[attr-defined]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        is_module = ast.unparse(node.value) in ("nn", "torch.nn")
        return ast.copy_location(ast.Name(node.attr, ast.Load()), node) if is_module else node


def _text(node: ast.expr) -> str:
    return ast.unparse(_Plain().visit(ast.parse(ast.unparse(node), mode="eval").body))


def _digest(block: ast.If) -> str:
    return sha256(ast.unparse(block).encode()).hexdigest()[:12]


def _is_plain_cross_entropy(module: Any) -> bool:
    return (
        type(module) is nn.CrossEntropyLoss
        and (module.ignore_index, module.reduction, module.label_smoothing) == (-100, "mean", 0.0)
        and module.weight is None
    )
