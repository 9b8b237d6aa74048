#!/bin/sh
# find_python.sh CANDIDATE...: print the path of the first one that runs, is Python 3.10-3.13 and can make virtual environments.
for p in "$@"; do
  found=$("$p" -c 'import sys; print(sys.version.split()[0], end=""); import venv, ensurepip
assert (3,10) <= sys.version_info[:2] <= (3,13); print("", sys.executable)' 2>/dev/null)
  case $found in
    *' /'*) echo "${found#* }"; exit 0;;
    *) seen="$seen $p(${found:-does not run})";;
  esac
done
echo "No usable Python 3.10, 3.11, 3.12 or 3.13 was found. Tried:$seen." >&2
echo "Install one together with its venv module (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
