# Part of install.sh and install-sglang.sh, which set $python and $cache.

# installable ends the script if $1 cannot be installed into $cache, which the variable $2 names, and locks $cache until the
# script ends.
installable() {
	"$python" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || {
		echo "error: $python is not Python 3.11 with venv, which $1 needs: install it, or name it in PYTHON" >&2
		exit 1
	}
	mkdir -p "$cache"
	free=$(df -Pk "$cache" | awk 'NR == 2 { print int($4 / 1048576) }')
	[ "$free" -ge 10 ] || {
		echo "error: $cache has $free GB free, the installation needs 10; name another folder in $2" >&2
		exit 1
	}
	exec 9>"$cache/.lock"
	if command -v flock >/dev/null; then
		flock -n 9 || { echo "error: another installation into $cache is running; wait for it" >&2; exit 1; }
	fi
}
