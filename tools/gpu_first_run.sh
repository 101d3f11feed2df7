#!/bin/bash
# A first run on a machine with a GPU that is lent for half an hour, a command at a time, each of at
# most ten minutes. It has Python 3.12, PyTorch with CUDA and the packages that
# `tools/requirements.py build library train dev` lists; it has no network.
#
#     tools/gpu_first_run.sh prepare   here, with a Python 3.12: builds what the machine needs
#     tools/gpu_first_run.sh 1 OUT     there: each layer once, the tests, memcheck
#     tools/gpu_first_run.sh 2 OUT     the benchmarks and the profile
#     tools/gpu_first_run.sh 3 OUT     training, and races
#
# Take the tree along, with cpr_ext/_C.*.so and cpr_ext.egg-info, which git ignores. OUT gets at
# most eight files. GPU_PYTHON: the interpreter. GPU_OPTIONS: of tools/gpu.py, such as --emulated.
set -eu
cd "$(dirname "$0")/.."
python=${GPU_PYTHON:-python3}
driver=${GPU_DRIVER:-$python tools/gpu.py}

prepare() {
  CPR_EXT_BUILD_DIR=build/gpu TORCH_CUDA_ARCH_LIST=9.0 CPR_EXT_CUDA=ON \
    "$python" setup.py -q egg_info build_ext --inplace
  { git describe --always --dirty --abbrev=40 --exclude '*' || echo unknown; } \
    >cpr_ext.egg-info/commit.txt # what the results are of
  echo "take along: $(ls cpr_ext/_C.*.so) cpr_ext.egg-info"
}

run() {
  local core='from cpr_ext import _C; assert _C.num_devices() > 0' build=
  case "${GPU_OPTIONS:-}" in *--emulated*) core='from cpr_ext import _C, _emulated' ;; esac
  PYTHONPATH=. "$python" -c "$core" && build=--no-build # else what came along does not fit
  # shellcheck disable=SC2086
  $driver --out "$out" $build --minutes 9.3 ${GPU_OPTIONS:-} "$@"
}

command=${1:?prepare, 1, 2 or 3}
if [ "$command" = prepare ]; then
  prepare
  exit
fi
out=${2:?the folder for results}
export OMP_NUM_THREADS=2
case "$command" in
  1) run smoke test memcheck ;;
  2) run bench profile ;;
  3) run train racecheck ;;
  *) echo "no command is called $command" >&2; exit 2 ;;
esac
