"""What is worth keeping from one process to the next: traced steps, measurements of ops, and plans.

Everything is JSON in one folder, so that it can be looked at, copied to a device and deleted at any time. Nothing
depends on it: a folder that cannot be used costs time, and a warning.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Union

from torch_odt import _extensions
from torch_odt._whole_file import whole_file
from torch_odt.errors import OdtWarning

FOLDER_VARIABLE = "TORCH_ODT_CACHE"
FORMAT = 1


def default_folder() -> Path:
    """$TORCH_ODT_CACHE, or the platform's folder for caches."""
    if os.environ.get(FOLDER_VARIABLE):
        return Path(os.environ[FOLDER_VARIABLE]).expanduser()
    if sys.platform == "darwin":
        return Path("~/Library/Caches/torch_odt").expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local")).expanduser() / "torch_odt" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_odt"


@functools.cache
def code_digest() -> str:
    """Tells this torch_odt's code, compiled parts included, from any other.

    What was measured, planned or traced by other code is not ours to use: an operator of ours may allocate otherwise.
    """
    return f"{_digest_of(Path(__file__).parent)}{'' if _extensions.has_kernels else '-plain'}"


def _digest_of(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".so")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


CacheOption = Union[str, Path, "Cache", Literal[False], None]


class Cache:
    """A folder of traces, measurements and plans. Any number of processes may use it at once.

    When to choose it: always; it is on by default. Turn it off to measure anew, or where nothing may be written.

    Args:
        folder: where it lies; `default_folder()` when None.
        enabled: False reads and writes no file. Measurements are then kept as long as the object is.

    Warns:
        OdtWarning: once for each object, when the folder cannot be read or written; and for each damaged entry, which
            is then ignored and overwritten.
    """

    def __init__(self, folder: str | Path | None = None, *, enabled: bool = True) -> None:
        self.folder = Path(folder).expanduser() if folder is not None else default_folder()
        self.enabled = enabled
        self._has_warned = False
        self._unwritten: dict[str, dict[str, Any]] = {}

    @classmethod
    def of_value(cls, value: CacheOption) -> Cache:
        """A cache from anything that a `cache=` may be given: False is none at all, None the default folder."""
        if isinstance(value, Cache):
            return value
        return cls(enabled=False) if value is False else cls(value)

    def load_profile(self, key: str) -> dict[str, Any]:
        """Measurements by signature, for one machine with one set of settings; empty when there are none."""
        entry = self._load(self._path("profiles", key), key)
        return (entry if isinstance(entry, dict) else {}) | self._unwritten.get(key, {})

    def save_profile(self, key: str, ops: dict[str, Any]) -> None:
        """Add measurements to those that are there; new ones replace old ones of the same signature."""
        path = self._path("profiles", key)
        with self._writing(path) as may_write:
            if may_write:
                self._write(path, key, self.load_profile(key) | ops)
            else:
                self._unwritten.setdefault(key, {}).update(ops)

    def load_plan(self, key: str) -> Any | None:
        """What was stored under a key from `plan_key`; None when there is nothing."""
        return self._load(self._path("plans", key), key)

    def save_plan(self, key: str, data: Any) -> None:
        """Store plain data (see `Plan.to_state`) under a key from `plan_key`."""
        self._save("plans", key, data)

    def load_trace(self, key: str) -> Any | None:
        """The trace that was stored under a key (see `torch_odt.capture.trace_cache`); None when there is none."""
        return self._load(self._path("traces", key), key)

    def save_trace(self, key: str, data: Any) -> None:
        """Store a trace as plain data."""
        self._save("traces", key, data)

    def clear(self) -> None:
        """Forget everything."""
        for kind in ("profiles", "plans", "traces"):
            for path in (self.folder / kind).glob("*.json"):
                with suppress(OSError):
                    path.unlink()

    def _path(self, kind: str, key: str) -> Path:
        # Entries of other code have other names: they are not found, and installations do not overwrite each other's.
        name = hashlib.sha256(f"{code_digest()} {key}".encode()).hexdigest()[:32]
        return self.folder / kind / f"{name}.json"

    def _save(self, kind: str, key: str, data: Any) -> None:
        path = self._path(kind, key)
        with self._writing(path) as may_write:
            if may_write:
                self._write(path, key, data)

    def _load(self, path: Path, key: str) -> Any | None:
        if not self.enabled:
            return None
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once(error)
            return None
        try:
            entry = json.loads(content)
            if entry["format"] != FORMAT or entry["key"] != key:
                return None
            return entry["data"]
        except (ValueError, KeyError, TypeError) as error:
            text = f"{path} is damaged ({error}); it is ignored and will be overwritten"
            warnings.warn(text, OdtWarning, stacklevel=3)
            return None

    @contextmanager
    def _writing(self, path: Path) -> Iterator[bool]:
        """Hold the folder's lock, so that two processes that add to a file do not lose each other's entries."""
        if not self.enabled:
            yield False
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = (path.parent / ".lock").open("w")
        except OSError as error:
            self._warn_once(error)
            yield False
            return
        with lock:
            _lock(lock.fileno())
            yield True

    def _write(self, path: Path, key: str, data: Any) -> None:
        text = json.dumps({"format": FORMAT, "key": key, "data": data}, separators=(",", ":"))
        try:
            with whole_file(path) as partial:
                partial.write_text(text, encoding="utf-8")
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        reason = error.strerror or str(error)
        warnings.warn(
            f"the cache folder {self.folder} cannot be used ({reason}); traces, measurements and plans are made anew "
            f"in every process. Set {FOLDER_VARIABLE} to a folder that can be written.",
            OdtWarning,
            stacklevel=4,
        )


def plan_key(*parts: object) -> str:
    """The name of a plan: everything that it depends on.

    Give the graph's fingerprint, the machine, torch's settings, the budget in bytes, the planner, its options and a
    digest of the costs.
    """
    return "; ".join(map(repr, parts))


def _lock(file: int) -> None:
    """Wait for the exclusive use of a file; it ends when the file is closed. Without locks the last writer wins."""
    try:
        import fcntl
    except ImportError:
        return
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
