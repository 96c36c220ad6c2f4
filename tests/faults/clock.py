"""A shim library that makes the time of day jump by up to a year several times a second.

It is compiled on demand and preloaded into the processes. Monotonic time is unchanged, as when an administrator or a
time server sets the clock.
"""

import shutil
import subprocess
from pathlib import Path

SHIM = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long jump(void) {
    static const long steps[] = {0, -86400, 31536000, -31536000, 3600, -7};
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return steps[(now.tv_sec * 5 + now.tv_nsec / 200000000) % 6];
}
int clock_gettime(clockid_t id, struct timespec *at) {
    int code = syscall(SYS_clock_gettime, id, at);
    if (code == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += jump();
    return code;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec + jump();
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timeval now;
    gettimeofday(&now, 0);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


def shim(folder: Path) -> Path | None:
    """Compile the shim and return its path, or None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, target = folder / "clock.c", folder / "clock.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(target), str(source)], check=True)
    return target
