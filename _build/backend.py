"""setuptools' build backend, plus one thing: it builds against the torch that is already installed.

pip builds in an isolated environment, but runs it with the interpreter of the environment that it installs into, whose
packages can therefore still be found. If torch is among them, extensions are compiled against that very torch. If not,
torch is asked for as a build requirement, like any other.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta

Settings = dict[str, Any] | None

TORCH = "torch>=2.13"


def _expose_installed_torch() -> bool:
    """Makes the target environment's torch importable; False if it has none."""
    if importlib.util.find_spec("torch") is not None:
        return True
    for name in ("purelib", "platlib"):
        path = sysconfig.get_path(name)
        if Path(path, "torch").is_dir():
            # Last, so that the build requirements chosen by pip stay in front.
            if path not in sys.path:
                sys.path.append(path)
            return True
    return False


def _requirements() -> list[str]:
    no_cpp = os.environ.get("TORCH_ODT_NO_CPP", "0") not in ("", "0")
    return [] if no_cpp or _expose_installed_torch() else [TORCH]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return _requirements()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return _requirements()


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    _expose_installed_torch()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    _expose_installed_torch()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    _expose_installed_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    _expose_installed_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    return build_meta.build_sdist(sdist_directory, config_settings)
