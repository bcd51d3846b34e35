"""Write one HTML file of a template: check its path, fill the template in, write the file in one step.

A page needs no network and no file beside it. Every text in it is escaped by jinja2, and of scripts its security policy
allows the one of the template alone, by its hash. (Styles are allowed: bars have their widths in attributes.)
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from hf_memopt.plain_data import checked_path
from hf_memopt.whole_files import write_whole

__all__ = ["check_page", "rendered", "write_page"]

ENDINGS = (".html", ".htm")


def check_page(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Refuse a path that no report can be written to.

    Raises:
        ValueError: ``path`` does not end in .html, is a folder or is in a missing one, or exists without ``force``.
    """
    found = checked_path("report", path)
    name = f"report={os.fspath(path)!r}"
    if found.suffix.lower() not in ENDINGS:
        raise ValueError(f"{name} is no web page; expected a name that ends in .html. Pass {found.stem}.html")
    if found.is_dir() or not found.parent.is_dir():
        raise ValueError(
            f"{name} is a folder or is in a missing one; expected a file in an existing folder. Pass {found.name} "
            "to write it here"
        )
    if found.exists() and not force:
        raise ValueError(f"{name} exists already; expected a new file. Pass another name, or force=True to replace it")


def write_page(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page; a former file at ``path`` is replaced in one step.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        write_whole(Path(path), page)
    except OSError as error:
        raise ValueError(
            f"report={os.fspath(path)!r} cannot be written ({error.strerror}); expected a writable folder with free "
            "space. Pass another file"
        ) from error


def rendered(template: str, view: Mapping[str, Any]) -> str:
    """Return the page of a template beside this file."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = lambda text: b64encode(sha256(text.encode()).digest()).decode()
    return environment.get_template(template).render(view)
