#!/bin/sh
# sh run.sh probe|check|tests|bench|profile|sanitize …: each says what it lacks; reports go to $OUT.
# $PYTHON is the Python; $ONLY chooses tests, and cases of profile and sanitize, by their names.
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
OUT=${OUT:-$here/out}
mkdir -p "$OUT"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
chmod -R go-w "$here/cubins"  # minimha reads no kernel that somebody else could have written
status=0

found() {
  command -v "$1" >/dev/null || { echo "$1 is not found here: $2 needs it"; return 1; }
}

probe() {
  if found nvidia-smi probe; then
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
  fi
  found ncu profile; found compute-sanitizer sanitize
  $python - <<'END'
import platform
from importlib.metadata import PackageNotFoundError, version

print("Python", platform.python_version(), platform.machine())
for name, what in (
    ("numpy", "check"), ("numba", "tests"), ("numba-cuda", "tests"), ("cuda-core", "tests"),
    ("ml_dtypes", "tests"), ("rich", "bench"), ("pytest", "tests"), ("hypothesis", "tests"),
    ("torch", "bench"),
):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(f"{name} is not installed here: {what} needs it")
END
}

bench() {
  (cd "$here/src" && $python "$here/carried.py" -m minimha bench \
    --backend cuda --format json --force --output "$OUT/bench.json")
}

profile() {
  found ncu profile || return 1
  (cd "$here" && ncu --target-processes all --clock-control none --set full --force-overwrite \
    --export "$OUT/profile" $python "$here/carried.py" -m calls "${ONLY:-}") &&
    ncu --import "$OUT/profile.ncu-rep" --page details >"$OUT/profile.txt"
}

sanitize() {
  found compute-sanitizer sanitize || return 1
  worst=0
  for tool in memcheck racecheck synccheck; do
    compute-sanitizer --target-processes all --tool $tool --error-exitcode 9 \
      --log-file "$OUT/$tool.txt" $python "$here/check.py" --runs 1 --no-times --only "${ONLY:-D=64}"
    ended=$?
    tail -n 1 "$OUT/$tool.txt"
    [ $ended = 0 ] || worst=$ended
  done
  return $worst
}

one() {
  case $1 in
  probe) probe ;;
  check) $python "$here/check.py" --output "$OUT/check.json" ;;
  tests)
    (cd "$here/src" && $python "$here/carried.py" -m pytest -p no:cacheprovider \
      -W "ignore:Unknown config option" --junitxml "$OUT/tests.xml" ${ONLY:+-k "$ONLY"} \
      tests/kernels/cuda/test_driver.py) ;;
  bench) bench ;;
  profile) profile ;;
  sanitize) sanitize ;;
  *) echo "$1 is none of probe, check, tests, bench, profile, sanitize"; return 2 ;;
  esac
}

[ $# -gt 0 ] || { echo "say which: probe, check, tests, bench, profile, sanitize"; exit 2; }
for command in "$@"; do
  echo "== $command"
  one "$command" || { status=$?; echo "== $command ended with status $status"; }
done
exit $status
