"""Plans as files: JSON that people can read, which says what it is and notices when it has been changed.

A plan is made for one graph, operator by operator, so a file that was changed by hand or in transit is refused before
anything in it is looked at. The digest is no signature: a file that carries its graph is a program, to be taken only
from where one would take code.
"""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_odt.errors import PlanError

KIND = "torch_odt plan"
_AGAIN = "copy it again from where it was made, or save the plan again"
VERSION = 1
_LINE = 120
# JSON has no numbers for these.
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_NUMBER_MARK = "%float"
# What comes before is read first, and tells whether the rest can be read.
_BODY = b',\n "content": '


def write_plan_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain data as a plan file.

    Raises:
        OSError: the file cannot be written.
    """
    from torch_odt import __version__

    body = "".join((*_lines(_encoded(content), 1), "\n}\n")).encode()
    head = {"format": KIND, "version": VERSION, "made by": f"torch_odt {__version__}", "digest": _digest(body)}
    path.write_bytes(json.dumps(head, indent=1)[:-2].encode() + _BODY + body)


def read_plan_file(path: Path) -> dict[str, Any]:
    """The data of `write_plan_file`.

    Raises:
        OSError: the file cannot be read.
        PlanError: it is no plan, of another version, or not as it was written.
    """
    head_text, mark, body = path.read_bytes().partition(_BODY)
    try:
        head = json.loads(head_text + b"}")
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no plan, or only a part of one ({error}): {_AGAIN}") from error
    if not isinstance(head, dict) or head.get("format") != KIND:
        raise PlanError(f"{path} is no plan: give a file that Plan.save or torch-odt plan --out wrote")
    if head.get("version") != VERSION:
        raise PlanError(
            f"{path} is a plan of version {head.get('version')!r}, made by {head.get('made by')!r}; "
            f"this torch_odt reads version {VERSION}: make the plan again, or use the torch_odt that made it"
        )
    if not mark or not body.rstrip().endswith(b"}\n}"):
        end = len(head_text) + len(mark) + len(body)
        raise PlanError(f"{path} ends too early, after {end} bytes: {_AGAIN}")
    if head.get("digest") != _digest(body):
        raise PlanError(f"{path} is not as it was written, somewhere behind byte {len(head_text + mark)}: {_AGAIN}")
    try:
        content: dict[str, Any] = _decoded(json.loads(body.rstrip()[:-1], parse_constant=_refuse_constant))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no plan: {error}; {_AGAIN}") from error
    return content


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds a bare {name}, which is no JSON")


def _encoded(data: Any) -> Any:
    """The same data, in which numbers that JSON has no form for are `{"%float": name}`."""
    if isinstance(data, float) and not math.isfinite(data):
        return {_NUMBER_MARK: str(data)}
    if isinstance(data, (list, tuple)):
        return [_encoded(item) for item in data]
    if isinstance(data, Mapping):
        return {key: _encoded(item) for key, item in data.items()}
    return data


def _decoded(data: Any) -> Any:
    if isinstance(data, list):
        return [_decoded(item) for item in data]
    if not isinstance(data, dict):
        return data
    if data.keys() == {_NUMBER_MARK} and isinstance(data[_NUMBER_MARK], str) and data[_NUMBER_MARK] in _NUMBERS:
        return _NUMBERS[data[_NUMBER_MARK]]
    return {key: _decoded(item) for key, item in data.items()}


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _lines(data: Any, indent: int) -> Iterator[str]:
    """JSON in lines of a readable length: what fits into one is not broken up."""
    text = json.dumps(data, allow_nan=False)
    if len(text) + indent <= _LINE or not data or not isinstance(data, (dict, list)):
        yield text
        return
    if isinstance(data, list) and all(isinstance(item, (int, float)) for item in data):
        yield textwrap.fill(text, _LINE, subsequent_indent=" " * (indent + 1), break_on_hyphens=False)
        return
    opening, closing = "{}" if isinstance(data, dict) else "[]"
    yield opening
    entries = data.items() if isinstance(data, dict) else ((None, item) for item in data)
    for number, (key, item) in enumerate(entries):
        yield f"{',' if number else ''}\n{' ' * (indent + 1)}"
        if key is not None:
            yield f"{json.dumps(key)}: "
        yield from _lines(item, indent + 1)
    yield f"\n{' ' * indent}{closing}"
