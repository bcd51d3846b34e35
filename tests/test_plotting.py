"""Every picture of the package: refused before it is drawn, there whole or not at all, and the extra it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hand_made import hand_made
from hf_memopt.errors import MissingExtraError
from hf_memopt.training.batching import padding_report

PICTURES: dict[str, Callable[[], Any]] = {  # what a picture is: what makes that which it shows
    "the picture of a padding report": lambda: padding_report([3, 4]),
    "the picture of an estimate": hand_made,
}


@pytest.fixture(params=PICTURES)
def purpose(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plot(purpose: str) -> Callable[[Path], None]:
    return PICTURES[purpose]().plot


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_picture_that_fails_or_is_interrupted_leaves_the_older_one(plot, tmp_path, monkeypatch, failure) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def fails(self: Any, stream: Any, **_: Any) -> None:
        stream.write(b"half")
        raise failure

    monkeypatch.setattr(figure.Figure, "savefig", fails)
    picture = tmp_path / "p.png"
    picture.write_text("an older one")
    with pytest.raises(ValueError if isinstance(failure, OSError) else KeyboardInterrupt) as error:
        plot(picture)
    if isinstance(failure, OSError):
        assert str(error.value) == (
            f"plot={str(picture)!r} cannot be written (No space left on device); expected a writable folder with free "
            "space. Pass another file"
        )
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["an older one"]


MISSING = "is a folder or is in a missing one; expected a file in an existing folder. Pass {} to write it here"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("p.gif", "is not a kind of picture; expected a name that ends in .png, .svg or .pdf. Pass p.png"),
        ("none/p.png", MISSING.format("p.png")),
        ("folder.png", MISSING.format("folder.png")),
    ],
)
def test_a_picture_of_another_kind_or_in_a_missing_folder_is_refused(plot, tmp_path, name, message) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError) as error:
        plot(tmp_path / name)
    argument = str(error.value).partition("=")[0]  # of the method, or of the function that it calls
    assert argument in ("path", "plot")
    assert str(error.value) == f"{argument}={str(tmp_path / name)!r} {message}"


def test_without_matplotlib_the_extra_is_named(purpose, plot, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError) as error:
        plot(tmp_path / "p.png")
    assert str(error.value) == (
        f"{purpose} needs matplotlib, which is not installed. Call: pip install 'hf-memopt[plot]'"
    )
