from __future__ import annotations

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torch_odt.cache import FOLDER_VARIABLE, Cache, _digest_of, default_folder, plan_key
from torch_odt.errors import OdtWarning


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_measurements_are_merged(tmp_path: Path) -> None:
    Cache(tmp_path).save_profile("here", {"a": [1], "b": [2]})
    Cache(tmp_path).save_profile("here", {"b": [3], "c": [4]})
    assert Cache(tmp_path).load_profile("here") == {"a": [1], "b": [3], "c": [4]}
    assert Cache(tmp_path).load_profile("there") == {}


def test_plans_are_found_by_their_whole_key(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    key = plan_key("fingerprint", "machine", 123, "auto")
    cache.save_plan(key, {"instructions": [["run", 1]]})
    assert cache.load_plan(key) == {"instructions": [["run", 1]]}
    assert cache.load_plan(plan_key("fingerprint", "machine", 124, "auto")) is None


def test_traces_are_no_plans(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.save_trace("key", {"step": 1})
    assert cache.load_trace("key") == {"step": 1}
    assert cache.load_plan("key") is None


def test_keys_keep_their_parts_apart() -> None:
    assert plan_key("a", "b; c") != plan_key("a; b", "c")
    assert plan_key(1) != plan_key("1")


def test_a_switched_off_cache_keeps_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, enabled=False)
    cache.save_profile("here", {"a": [1]})
    cache.save_plan("key", 1)
    assert cache.load_profile("here") == {"a": [1]}, "measured once, as long as the object lives"
    assert Cache(tmp_path, enabled=False).load_profile("here") == {}
    assert cache.load_plan("key") is None
    assert list(tmp_path.iterdir()) == []


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "mine"))
    assert Cache().folder == default_folder() == tmp_path / "mine"
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "torch_odt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "torch_odt"


def test_whatever_an_option_may_be(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert Cache.of_value(cache) is cache
    assert Cache.of_value(tmp_path).folder == Cache.of_value(str(tmp_path)).folder == tmp_path
    assert Cache.of_value(None).folder == default_folder()
    assert Cache.of_value(None).enabled and not Cache.of_value(False).enabled


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"format": 1}', "\xff"])
def test_damaged_entries_are_ignored_and_overwritten(tmp_path: Path, content: str) -> None:
    cache = Cache(tmp_path)
    cache.save_plan("key", {"old": 1})
    only_file(tmp_path / "plans").write_text(content, encoding="latin-1")
    with pytest.warns(OdtWarning, match="is damaged"):
        assert cache.load_plan("key") is None
    cache.save_plan("key", {"new": 1})
    assert cache.load_plan("key") == {"new": 1}


def test_a_damaged_profile_does_not_stop_the_next_one(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.save_profile("here", {"a": [1]})
    only_file(tmp_path / "profiles").write_text("{", encoding="utf-8")
    with pytest.warns(OdtWarning, match="is damaged"):
        cache.save_profile("here", {"b": [2]})
    assert cache.load_profile("here") == {"b": [2]}


def test_entries_of_another_format_are_as_good_as_absent(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.save_plan("key", 1)
    path = only_file(tmp_path / "plans")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    assert cache.load_plan("key") is None


def test_entries_of_other_code_are_neither_used_nor_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    cache.save_profile("here", {"a": [1]})
    with monkeypatch.context() as other:
        other.setattr("torch_odt.cache.code_digest", lambda: "other")
        assert cache.load_profile("here") == {}
        cache.save_profile("here", {"a": [2]})
    assert cache.load_profile("here") == {"a": [1]}


def test_every_edit_makes_other_code(tmp_path: Path) -> None:
    folder = tmp_path / "package" / "inner"
    folder.mkdir(parents=True)
    found = [_digest_of(tmp_path)]
    for name, text in [("a.py", "1"), ("a.py", "2"), ("inner/b.py", "1"), ("_C.so", "1"), ("_C.so", "2")]:
        (tmp_path / "package" / name).write_text(text)
        found.append(_digest_of(tmp_path))
    (folder / "b.py").rename(folder / "c.py")
    found.append(_digest_of(tmp_path))
    (folder / "README.md").write_text("nothing that runs")
    assert len(set(found)) == len(found)
    assert _digest_of(tmp_path) == found[-1]


def test_a_folder_that_cannot_be_made_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(OdtWarning, match="file/cache cannot be used") as warned:
        cache.save_profile("here", {"a": [1]})
        cache.save_plan("key", 1)
        assert cache.load_profile("here") == {"a": [1]}
        assert cache.load_plan("key") is None
    assert len(warned) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_folder_can_still_be_read(tmp_path: Path) -> None:
    Cache(tmp_path).save_plan("key", 1)
    for folder in (tmp_path / "plans", tmp_path):
        folder.chmod(0o500)
    try:
        cache = Cache(tmp_path)
        assert cache.load_plan("key") == 1
        with pytest.warns(OdtWarning, match="cannot be used"):
            cache.save_plan("other", 2)
    finally:
        for folder in (tmp_path, tmp_path / "plans"):
            folder.chmod(0o700)


def test_a_folder_without_permission_can_still_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).save_plan("key", 1)

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    cache = Cache(tmp_path)
    with pytest.warns(OdtWarning, match="cannot be used \\(Permission denied\\)") as warned:
        cache.save_plan("key", 2)
        cache.save_profile("here", {"a": [1]})
    assert len(warned) == 1
    monkeypatch.undo()
    assert cache.load_plan("key") == 1


def test_a_full_disk_leaves_the_old_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.save_plan("key", "old")

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.warns(OdtWarning, match="No space left on device"):
        cache.save_plan("key", "new")
    assert cache.load_plan("key") == "old"
    assert not list((tmp_path / "plans").glob("*.tmp"))


def _add_measurements(folder: Path, writer: int) -> None:
    for i in range(20):
        Cache(folder).save_profile("here", {f"{writer}-{i}": [i]})


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    # Each writer opens the lock anew, so threads exclude each other as processes do.
    with ThreadPoolExecutor(3) as writers:
        for done in [writers.submit(_add_measurements, tmp_path, i) for i in range(3)]:
            done.result()
    assert len(Cache(tmp_path).load_profile("here")) == 60


def test_clear_forgets_everything(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.save_plan("key", 1)
    cache.save_profile("here", {"a": [1]})
    cache.save_trace("key", 1)
    cache.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load_plan("key") is None
        assert cache.load_profile("here") == {}
        assert cache.load_trace("key") is None
