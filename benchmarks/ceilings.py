"""What this machine can do at most: memory read bandwidth, f32 FMA and int8 dot rates. Kernels are judged by these.

    python benchmarks/ceilings.py [--rounds 9] [--threads 1,2] [--json]

The loops are C++ compiled here with g++ (`CXX` overrides it) for each instruction set that the processor has; they are
no part of the library. A thread is a Python thread inside a ctypes call, which runs without the interpreter's lock.
Each row of the table is the median over the rounds with the spread (max - min) / median, and the best round.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCE = r"""
#include <immintrin.h>
#include <stdint.h>
#define API extern "C" __attribute__((visibility("default")))
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vnni")))

API int has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
API int has_avx512vnni() { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"); }

// Reads n bytes (a multiple of 512) once, in 8 independent sums, and asks for each line 8 KiB ahead.
API AVX2 int64_t read_avx2(const char* p, int64_t n) {
  __m256i s[8] = {};
  for (int64_t i = 0; i < n; i += 256)
    for (int j = 0; j < 8; j++) {
      __builtin_prefetch(p + i + 32 * j + 8192);
      s[j] = _mm256_add_epi64(s[j], _mm256_load_si256((const __m256i*)(p + i + 32 * j)));
    }
  for (int j = 1; j < 8; j++) s[0] = _mm256_add_epi64(s[0], s[j]);
  return _mm256_extract_epi64(s[0], 0);
}
API AVX512 int64_t read_avx512vnni(const char* p, int64_t n) {
  __m512i s[8] = {};
  for (int64_t i = 0; i < n; i += 512)
    for (int j = 0; j < 8; j++) {
      __builtin_prefetch(p + i + 64 * j + 8192);
      s[j] = _mm512_add_epi64(s[j], _mm512_load_si512(p + i + 64 * j));
    }
  for (int j = 1; j < 8; j++) s[0] = _mm512_add_epi64(s[0], s[j]);
  return _mm512_reduce_add_epi64(s[0]);
}

// Twelve (AVX2) or sixteen (AVX-512) independent chains in registers hide the latency; the empty asm keeps each step.
API AVX2 int64_t fma_avx2(const char*, int64_t n) {
  __m256 s[12] = {}, a = _mm256_set1_ps(0.5f);
  for (int64_t i = 0; i < n; i++)
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) { s[j] = _mm256_fmadd_ps(s[j], a, a); asm volatile("" : "+x"(s[j])); }
  return 12 * 8 * n;
}
API AVX512 int64_t fma_avx512vnni(const char*, int64_t n) {
  __m512 s[16] = {}, a = _mm512_set1_ps(0.5f);
  for (int64_t i = 0; i < n; i++)
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) { s[j] = _mm512_fmadd_ps(s[j], a, a); asm volatile("" : "+v"(s[j])); }
  return 16 * 16 * n;
}

// int8 multiply-adds into int32: maddubs + madd + add with AVX2, one vpdpbusd with AVX-512 VNNI.
API AVX2 int64_t dot_avx2(const char*, int64_t n) {
  __m256i s[8] = {}, a = _mm256_set1_epi8(1), one = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < n; i++)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      __m256i b = a;
      asm volatile("" : "+x"(b));
      s[j] = _mm256_add_epi32(s[j], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), one));
      asm volatile("" : "+x"(s[j]));
    }
  return 8 * 32 * n;
}
API AVX512 int64_t dot_avx512vnni(const char*, int64_t n) {
  __m512i s[16] = {}, a = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < n; i++)
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) { s[j] = _mm512_dpbusd_epi32(s[j], a, a); asm volatile("" : "+v"(s[j])); }
  return 16 * 64 * n;
}
"""

READ_BYTES = 1 << 28  # per thread
LOOPS = 4_000_000


def compile_loops(folder: Path) -> ctypes.CDLL:
    """The C++ loops as a loaded library. Raises SystemExit without a compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise SystemExit(f"ceilings: no compiler {compiler!r}; set CXX")
    source, library = folder / "ceilings.cpp", folder / "ceilings.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    loops = ctypes.CDLL(str(library))
    for kind in ("read", "fma", "dot"):
        for isa in ("avx2", "avx512vnni"):
            function = getattr(loops, f"{kind}_{isa}")
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return loops


def huge_pages(size: int) -> mmap.mmap:
    """Zeros, in huge pages where the system gives them: from small ones a processor may read much more slowly."""
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, mmap.PAGESIZE):
        buffer[at] = 0
    return buffer


def timed(calls: list, pool: ThreadPoolExecutor) -> float:
    """Seconds until all calls, started together on the pool's threads, have ended."""
    start = time.perf_counter()
    for future in [pool.submit(*call) for call in calls]:
        future.result()
    return time.perf_counter() - start


def measure(rounds: int, threads: int, loops: ctypes.CDLL) -> dict[str, list[float]]:
    """{name: one rate per round}: GB/s for reads, Gop/s (multiply and add counted apart) for the others."""
    isas = [isa for isa in ("avx2", "avx512vnni") if getattr(loops, f"has_{isa}")()]
    buffers = [huge_pages(READ_BYTES) for _ in range(threads)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers]
    a, b = torch.randn(512, 2048), torch.randn(2048, 2048)
    torch.set_num_threads(threads)
    rates: dict[str, list[float]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds + 1):  # the first round warms up and is dropped
            for isa in isas:
                seconds = timed([(getattr(loops, f"read_{isa}"), at, READ_BYTES) for at in addresses], pool)
                rates.setdefault(f"read {isa} [GB/s]", []).append(threads * READ_BYTES / seconds / 1e9)
                for kind in ("fma", "dot"):
                    function = getattr(loops, f"{kind}_{isa}")
                    steps = function(None, 1) * LOOPS  # multiply-adds of a call
                    seconds = timed([(function, None, LOOPS)] * threads, pool)
                    unit = {"fma": "f32 fma", "dot": "int8 dot"}[kind]
                    rates.setdefault(f"{unit} {isa} [Gop/s]", []).append(2 * steps * threads / seconds / 1e9)
            start = time.perf_counter()
            torch.nn.functional.linear(a, b)
            seconds = time.perf_counter() - start
            rates.setdefault("f32 torch linear 512x2048x2048 [Gop/s]", []).append(2 * 512 * 2048 * 2048 / seconds / 1e9)
    return {name: values[1:] for name, values in rates.items()}


def main() -> None:
    """Prints the table, or with --json `{threads: {name: {median, best, spread}}}`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        loops = compile_loops(Path(folder))
        for threads in map(int, options.threads.split(",")):
            report[threads] = {
                name: {
                    "median": statistics.median(values),
                    "best": max(values),
                    "spread": (max(values) - min(values)) / statistics.median(values),
                }
                for name, values in measure(options.rounds, threads, loops).items()
            }
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        return
    print(f"{'ceiling':42} {'threads':>7} {'median':>9} {'best':>9} {'spread':>7}")
    for threads, rows in report.items():
        for name, row in rows.items():
            print(f"{name:42} {threads:7} {row['median']:9.1f} {row['best']:9.1f} {row['spread']:7.0%}")


if __name__ == "__main__":
    main()
