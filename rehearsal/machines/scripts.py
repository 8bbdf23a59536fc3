"""What is run in or around a machine, as text for `sh -c`; the words after it are $1, $2 …"""

CUT = """set -eu
for chain in "INPUT ! -i lo" "OUTPUT ! -o lo"; do
  iptables -w 5 -C $chain -j DROP 2>/dev/null || iptables -w 5 -I $chain -j DROP
done"""
HEAL = """set -eu
for chain in "INPUT ! -i lo" "OUTPUT ! -o lo"; do
  if iptables -w 5 -C $chain -j DROP 2>/dev/null; then iptables -w 5 -D $chain -j DROP; fi
done"""

# The file system shrinks to what is in it, so that nothing has to be written to make it full. It may grow between the
# two commands, and then the second is refused: hence the tries. Without a file in it its size would be 0, which means
# no limit.
FILL = """head -c 4096 /dev/zero >"$1/.full" 2>/dev/null
for attempt in 1 2 3 4 5 6 7 8 9; do
  used=$(df -k --output=used "$1" | tail -n 1)
  if mount -o "remount,size=$((used))k" "$1"; then exit 0; fi
done
exit 1"""
EMPTY = """set -eu
mount -o "remount,size=$2m" "$1"
rm -f "$1/.full\""""

UNMOUNT = """set -eu
if mountpoint -q "$1"; then umount --lazy "$1"; fi"""
MOUNT = """set -eu
if ! mountpoint -q "$1"; then mount --bind "$2" "$1"; fi"""

READ = 'cat "$1"'
WRITE = 'printf %s "$2" >"$1.new" && mv "$1.new" "$1"'
TAKE_AWAY = """set -eu
if [ -e "$1.away" ] || [ -L "$1.away" ]; then exit 0; fi
mv "$1" "$1.away\""""
BRING_BACK = 'if [ -e "$1.away" ] || [ -L "$1.away" ]; then mv "$1.away" "$1"; fi'

# Left over when this shell ends, it is a child of the container's first process like any other of the user's.
HOLD = 'exec 9<>"$1" || exit 1; sleep infinity >/dev/null 2>&1 & echo $!'
RELEASE = """for process in /proc/[0-9]*; do
  [ "$(cat "$process/comm" 2>/dev/null)" = sleep ] || continue
  for each in "$process"/fd/*; do
    if [ "$(readlink "$each")" = "$1" ]; then kill -KILL "${process#/proc/}"; break; fi
  done
done
exit 0"""

NEW_HOST_KEY = """set -eu
[ -e "$1.own" ] || cp -p "$1" "$1.own"
rm -f "$1.other" "$1.other.pub"
ssh-keygen -q -t ed25519 -N '' -C '' -f "$1.other"
mv "$1.other" "$1"
cat "$1.other.pub\""""
OWN_HOST_KEY = 'if [ -e "$1.own" ]; then mv "$1.own" "$1"; fi'
RELOAD = 'kill -HUP "$(cat /run/sshd.pid)"'

# Its containers go on, and the next daemon ends them.
KILL_DOCKER = """set -eu
daemon=$(cat /run/docker.pid)
kill -KILL "$daemon"
while kill -0 "$daemon" 2>/dev/null; do sleep 0.05; done"""

# Field 22 of stat is when it started; its command may hold blanks and is cut off first.
NEWEST_JOB = """for process in /proc/[0-9]*; do
  tr '\\0' '\\n' 2>/dev/null <"$process/cmdline" | grep -qx 'jobs\\.[a-z0-9_]*' || continue
  started=$(sed 's/.*) //' "$process/stat" 2>/dev/null | cut -d ' ' -f 20)
  [ -n "$started" ] && echo "$started ${process#/proc/}"
done | sort -n | tail -n 1 | cut -d ' ' -f 2"""
SIGNAL = 'kill -s "$1" "$2"'
