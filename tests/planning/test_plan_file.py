"""The files themselves: whatever happens to one, it is read as it was written or refused."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import make_plan

from torch_odt.errors import PlanError
from torch_odt.planning.plan import Plan, load_plan
from torch_odt.planning.plan_file import KIND, VERSION, read_plan_file, write_plan_file

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=40,
)


@functools.cache
def written() -> bytes:
    with TemporaryDirectory() as folder:
        make_plan().save(Path(folder) / "plan.json")
        return (Path(folder) / "plan.json").read_bytes()


def read(content: bytes) -> Plan:
    with TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_bytes(content)
        return load_plan(Path(folder) / "plan.json")


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_plain_data_survives_a_file(content: dict[str, object]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_plan_file(path, content)
        assert read_plan_file(path) == content
        assert json.loads(path.read_text(encoding="utf-8"))["content"] == content


def test_numbers_that_json_has_not_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content = {"numbers": [math.inf, -math.inf, 1.5], "nested": {"low": -math.inf, "word": "inf"}, "nan": [math.nan]}
    write_plan_file(path, content)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    found = read_plan_file(path)
    assert math.isnan(found.pop("nan")[0])
    assert found == {name: content[name] for name in ("numbers", "nested")}


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_a_bare_constant_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan_file(path, {"seconds": 123.5})
    head, mark, body = path.read_bytes().partition(b',\n "content": ')
    changed = body.replace(b"123.5", name.encode())
    path.write_bytes(head.replace(*(hashlib.sha256(b).hexdigest().encode() for b in (body, changed))) + mark + changed)
    with pytest.raises(PlanError, match=rf"plan\.json is no plan: it holds a bare {name}.*save the plan again"):
        read_plan_file(path)


@pytest.mark.parametrize("length", [300, 1000])
def test_a_torn_file_is_said_to_end_too_early(length: int) -> None:
    with pytest.raises(PlanError, match=rf"plan\.json ends too early, after {length} bytes: copy it again"):
        read(written()[:length])


def test_a_changed_file_says_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"plan\.json is not as it was written, .* byte \d+: copy it again"):
        read(written().replace(b"what was asked for", b"what was askad for"))


def test_a_file_is_for_people() -> None:
    text = written().decode()
    document = json.loads(text)
    assert list(document) == ["format", "version", "made by", "digest", "content"]
    assert (document["format"], document["version"]) == (KIND, VERSION)
    assert max(map(len, text.splitlines())) <= 125


@given(st.data())
def test_a_part_of_a_file_is_refused(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(written().rstrip()) - 1))
    with pytest.raises(PlanError):
        read(written()[:length])


@given(st.data())
def test_a_changed_file_is_read_as_it_was_or_refused(data: st.DataObject) -> None:
    content = bytearray(written())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        plan = read(bytes(content))
    except PlanError:
        return
    assert plan == read(written())


@pytest.mark.parametrize("version", [VERSION + 1, 0, "1", None])
def test_another_version_is_named(version: object) -> None:
    content = written().replace(b'"version": 1', b'"version": ' + json.dumps(version).encode())
    with pytest.raises(
        PlanError, match=rf"version {version!r}, made by 'torch_odt .*reads version {VERSION}: make the plan again"
    ):
        read(content)


def test_a_later_version_may_look_otherwise() -> None:
    content = written().partition(b'"digest"')[0].replace(b'"version": 1', b'"version": 7') + b'"content": 3}'
    with pytest.raises(PlanError, match="version 7"):
        read(content)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"format": "torch_odt plan"}', b"[" * 100_000])
def test_what_is_no_plan_is_refused(content: bytes) -> None:
    with pytest.raises(PlanError, match=r"plan\.json"):
        read(content)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "plan.json")
