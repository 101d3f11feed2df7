#!/usr/bin/env bash
# Builds the native core with AddressSanitizer (and UndefinedBehaviorSanitizer) and with
# ThreadSanitizer, each in a folder of its own under build/, and runs the native tests under each.
# One line per sanitizer; any report or failing test makes the exit status non-zero.
#
#   tools/sanitize.sh [address|thread|device]...  the first two if none is named; device: the CUDA
#                                             sources as they run on the CPU, under address
#   tools/sanitize.sh build [address|thread]...  only the builds, which need no torch
#   tools/sanitize.sh fuzz --seconds 600      instead of the tests: hostile stores, under address
#   PYTHON=python3.12 PYTEST_ARGS="-k crc32c" tools/sanitize.sh address
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python}
status=0
# Two sanitizers side by side share the cores. Each process takes seconds to start: on two cores,
# pytest's own runs the tests (0 is that).
workers=$(($(nproc) / 2))
if [ "$workers" -lt 2 ]; then workers=0; fi
# `python -m pytest` would find the core built in place before the one built here.
pytest='import sys; sys.path.remove(""); import pytest; sys.exit(pytest.main())'

# Under ASLR with many random bits a sanitizer may not find its shadow memory free.
without_aslr() {
  if setarch -R true 2>/dev/null; then setarch -R "$@"; else "$@"; fi
}

# build_one KIND RUNTIME FOLDER: sets build, log, package, runtime_path.
build_one() {
  local kind=$1 runtime=$2
  build=build/$3 log=build/$3.log
  mkdir -p "$build"
  # Its CUDA sources are built with `emulated` only: it takes minutes, and ThreadSanitizer does not
  # follow the fibers of the emulated device.
  if ! CPR_EXT_SANITIZE=$kind CPR_EXT_CUDA=OFF CPR_EXT_EMULATED=${emulated:-0} "$python" setup.py -q build --build-base "$build" \
      >"$log" 2>&1; then
    tail -40 "$log"
    echo "$kind: the build failed, see $log"
    return 1
  fi
  package=$(echo "$PWD/$build"/lib.*)
  runtime_path=$(${CXX:-g++} -print-file-name="$runtime")
  if [ ! -f "$runtime_path" ]; then
    echo "$kind: $runtime is not installed beside ${CXX:-g++}"
    return 1
  fi
  rm -f "$build"/report.*
}

# run_under KIND COMMAND...: with the core built last.
# AddressSanitizer sees each object of Python's; ThreadSanitizer would only take longer. Python's
# own allocations at exit are no leaks of ours. C++ exceptions cross uninstrumented libraries, so
# libstdc++ is preloaded too, that their throwing can be intercepted. A process that a test forks
# must not wait for threads that it does not have.
# ThreadSanitizer's reports come from threads, not from many examples.
run_under() {
  local kind=$1 profile=sanitize allocator=malloc
  shift
  if [ "$kind" = thread ]; then profile=threads allocator=pymalloc; fi
  without_aslr env \
    LD_PRELOAD="$runtime_path $(${CXX:-g++} -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:malloc_context_size=10:${ASAN_MORE:-}log_path=$PWD/$build/report" \
    UBSAN_OPTIONS="print_stacktrace=1:log_path=$PWD/$build/report" \
    TSAN_OPTIONS="exitcode=66:suppressions=$PWD/tools/tsan.supp:die_after_fork=0:log_path=$PWD/$build/report" \
    PYTHONPATH="$package:$PWD" PYTHONMALLOC=$allocator \
    CPR_EXT_SANITIZER=$kind CPR_EXT_BUILT_IN="$package/" CPR_EXT_EMULATED=${emulated:-0} CPR_EXT_HYPOTHESIS=$profile "$@"
}

# The fibers of the emulated device make AddressSanitizer say once, in these lines, that it may be
# wrong about them; that is no report.
no_report='swapcontext functions|__asan_handle_no_return|^False positive error reports|^For details see'
list_reports() {
  local file
  for file in $(find "$build" -maxdepth 1 -name 'report.*' -size +0 | sort); do
    if grep -qvE "$no_report" "$file"; then echo "$file"; fi
  done
}

# No threads are at work in how scores are ranked, in how a row is rounded, or in counters that wait
# for a lookup, and hardly any where a file cannot be written. Rows that are cut into many tasks are
# copied alike by any number of threads, and other scores take other branches of the same threads.
# Under ThreadSanitizer these tests take longer than all others. `address` runs them all.
no_threads='not (ranked_as_a_sort or (test_write_failures and not (failing_device and 28-))'
no_threads+=' or rows_that_are_never_looked_up or (test_row_rounding and not threads_round)'
no_threads+=' or (inputs_of_many_tasks and not -3])'
no_threads+=' or (every_size_budget and not (-floats] or -large_counts])))'

run_one() {
  local kind=$1 begin=$SECONDS code reports selected=()
  if [ "$kind" = thread ] && [ -z "${PYTEST_TESTS:-}${PYTEST_ARGS:-}" ]; then selected=(-k "$no_threads"); fi
  build_one "$@" || return 1
  if [ "$only_build" = 1 ]; then return 0; fi
  run_under "$kind" "$python" -c "$pytest" ${PYTEST_TESTS:-python_tests/csrc python_tests/saving/test_background_capture.py} -p no:cacheprovider \
    -o faulthandler_timeout=200 -n "$workers" "${selected[@]}" ${PYTEST_ARGS:-} >"$log" 2>&1
  code=$?
  reports=$(list_reports)
  if ! grep -q "^native core: $package/" "$log"; then
    tail -40 "$log"
    echo "$kind: the tests did not load the core built in $build, see $log"
    return 1
  fi
  if [ "$code" -ne 0 ] || [ -n "$reports" ]; then
    tail -40 "$log"
    [ -n "$reports" ] && head -60 $reports
    echo "$kind: FAILED (exit $code, $(echo $reports | wc -w) reports), see $log"
    return 1
  fi
  echo "$kind: no report; $(tail -1 "$log" | tr -d '=') (run $((SECONDS - begin)) s)"
}

# An allocation that no little store justifies is refused, and with that a finding. What is freed is
# kept from use for a while; less of it than usual, as it counts as taken.
run_fuzz() {
  local code reports
  build_one address libasan.so asan || return 1
  ASAN_MORE="max_allocation_size_mb=65:quarantine_size_mb=16:" \
    run_under address "$python" -P -m python_tests.faults.fuzz "$@"
  code=$?
  reports=$(list_reports)
  [ -n "$reports" ] && head -60 $reports
  [ "$code" -eq 0 ] && [ -z "$reports" ]
}

if [ "${1:-}" = fuzz ]; then
  shift
  run_fuzz "$@"
  exit
fi

only_build=0
if [ "${1:-}" = build ]; then
  shift
  only_build=1
fi

# Side by side: each has a build and a log of its own.
declare -A started
for one in ${*:-address thread}; do
  case $one in
    address) run_one address libasan.so asan & started[address]=$! ;;
    device)
      emulated=1 PYTEST_TESTS=python_tests/csrc PYTEST_ADDOPTS="-m emulated" \
        run_one address libasan.so asan-device & started[device]=$! ;;
    thread) run_one thread libtsan.so tsan & started[thread]=$! ;;
    *) echo "'$one' is no sanitizer; allowed: address, thread, device" >&2; status=2 ;;
  esac
done
for pid in "${started[@]}"; do
  wait "$pid" || status=1
done
exit $status
