"""How many threads are worth having: physical cores, within what the process may use."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Physical cores among the processors that this process may run on (its affinity, on Linux), within the processor
    time that its control group, a container's, is given. At least 1.

    Two hyper-threads of a core share its arithmetic and its way to memory: kernels that are bound by either gain
    nothing from the second. torch's own default knows cores, but no group's limit, and threads beyond that limit only
    make each other wait. Where the system does not tell of affinity (macOS, Windows), all processors count.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = {_text(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in os.sched_getaffinity(0)}
    return max(1, min([len(cores), *_group_limits()]))


def _group_limits() -> list[int]:
    """Whole processors' worth of time that the control group may take in a period, if it has a limit."""
    pairs = [_text(_GROUP_2).split(), [_text(path) for path in _GROUP_1]]  # quota and period, in microseconds
    return [int(pair[0]) // int(pair[1]) for pair in pairs if all(map(str.isdecimal, pair)) and len(pair) == 2]


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""


_CPUS = Path("/sys/devices/system/cpu")
# Of a control group, version 2 ("max" or a number, and a number) and 1 (-1 is no limit); in a container its own.
_GROUP_2 = Path("/sys/fs/cgroup/cpu.max")
_GROUP_1 = [Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")]
