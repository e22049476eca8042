"""What the operating system says, read from trees of files that play every kind of system."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from torch_odt import memory

MIB = 2**20


def write_tree(root: Path, files: dict[str, str | int]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def cgroup_v2(folder: str, maximum: str | int, current: int, inactive_file: int = 0) -> dict[str, str | int]:
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{base}/memory.max": maximum,
        f"{base}/memory.current": current,
        f"{base}/memory.stat": f"anon 17\ninactive_file {inactive_file}\nactive_file 5",
    }


def test_version_2_subtracts_what_can_be_reclaimed(tmp_path: Path) -> None:
    tree = {"proc/self/cgroup": "0::/job"} | cgroup_v2("job", 500 * MIB, 300 * MIB, inactive_file=100 * MIB)
    assert memory.available_detail(root=write_tree(tmp_path, tree))["cgroup_v2"] == 300 * MIB
    assert memory.available(root=tmp_path) == min(300 * MIB, psutil.virtual_memory().available)


def test_version_2_takes_the_tightest_of_nested_groups(tmp_path: Path) -> None:
    tree = (
        {"proc/self/cgroup": "0::/outer/middle/inner"}
        | cgroup_v2("outer", 400 * MIB, 350 * MIB)
        | cgroup_v2("outer/middle", "max", 200 * MIB)
        | cgroup_v2("outer/middle/inner", 300 * MIB, 100 * MIB)
    )
    assert memory.available_detail(root=write_tree(tmp_path, tree))["cgroup_v2"] == 50 * MIB


def test_version_2_counts_the_throttling_limit(tmp_path: Path) -> None:
    tree = {"proc/self/cgroup": "0::/job"} | cgroup_v2("job", "max", 100 * MIB)
    tree["sys/fs/cgroup/job/memory.high"] = 250 * MIB
    assert memory.available_detail(root=write_tree(tmp_path, tree))["cgroup_v2"] == 150 * MIB


def test_unlimited_groups_are_absent(tmp_path: Path) -> None:
    tree = {"proc/self/cgroup": "0::/job"} | cgroup_v2("job", "max", 100 * MIB)
    assert "cgroup_v2" not in memory.available_detail(root=write_tree(tmp_path, tree))


def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path) -> None:
    tree = {"proc/self/cgroup": "0::/../../elsewhere"} | cgroup_v2("", 500 * MIB, 200 * MIB)
    assert memory.available_detail(root=write_tree(tmp_path, tree))["cgroup_v2"] == 300 * MIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    tree = {"proc/self/cgroup": "0::/job"} | cgroup_v2("job", 100 * MIB, 120 * MIB)
    assert memory.available(root=write_tree(tmp_path, tree)) == 0


def test_version_1_nested_with_an_unlimited_root(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    tree: dict[str, str | int] = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/abc\n7:memory:/docker/abc\n0::/docker/abc",
        f"{mount}/memory.limit_in_bytes": 9223372036854771712,
        f"{mount}/memory.usage_in_bytes": 900 * MIB,
        f"{mount}/docker/memory.limit_in_bytes": 800 * MIB,
        f"{mount}/docker/memory.usage_in_bytes": 100 * MIB,
        f"{mount}/docker/abc/memory.limit_in_bytes": 600 * MIB,
        f"{mount}/docker/abc/memory.usage_in_bytes": 500 * MIB,
        f"{mount}/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MIB}",
    }
    detail = memory.available_detail(root=write_tree(tmp_path, tree))
    assert detail["cgroup_v1"] == 120 * MIB
    assert "cgroup_v2" not in detail


def test_a_system_without_control_groups_has_none(tmp_path: Path) -> None:
    assert set(memory.available_detail(root=tmp_path)) <= {"system", "rlimit_as", "rlimit_data"}


def test_process_limits_leave_what_is_not_used_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 1000 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    write_tree(tmp_path, {"proc/self/status": f"VmSize:\t {300 * 1024} kB\nVmData:\t {200 * 1024} kB"})
    assert memory.available_detail(root=tmp_path)["rlimit_as"] == 700 * MIB
    assert "rlimit_data" not in memory.available_detail(root=tmp_path)
    limits[resource.RLIMIT_DATA] = 250 * MIB
    assert memory.available(root=tmp_path) == 50 * MIB


def test_process_bytes_leaves_out_the_pages_of_files(tmp_path: Path) -> None:
    status = "VmHWM:\t  5000 kB\nVmRSS:\t  4000 kB\nRssAnon:\t  1000 kB\nRssFile:\t  2700 kB\nRssShmem:\t  300 kB"
    root = write_tree(tmp_path, {"proc/self/status": status})
    assert memory.process_bytes(root=root) == 1300 * 1024
    assert memory.peak_process_bytes(root=root) == 5000 * 1024


def test_systems_without_proc_are_asked_otherwise(tmp_path: Path) -> None:
    assert memory.process_bytes(root=tmp_path) > MIB
    assert memory.peak_process_bytes(root=tmp_path) > MIB
    assert memory.reset_process_peak(root=tmp_path) is False


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only on Linux")
def test_the_peak_of_this_process_can_be_reset(run_python: Callable) -> None:
    script = """
from torch_odt import memory
if memory.reset_process_peak():
    level = memory.peak_process_bytes()
    block = bytearray(64 * 2**20)
    assert memory.peak_process_bytes() - level > 60 * 2**20
    assert memory.most_resident_bytes() > 60 * 2**20 < memory.process_bytes()
    del block
    assert memory.reset_process_peak() and memory.peak_process_bytes() - level < 20 * 2**20
"""
    result = run_python(script)
    assert result.returncode == 0, result.stderr


def test_children_are_counted_by_their_private_pages() -> None:
    before = memory.children_bytes()
    code = "import sys; block = bytearray(b'x') * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        grown = memory.children_bytes() - before
        child.stdin.close()
    assert 64 << 20 <= grown < 96 << 20
    assert memory.children_bytes() == before
