# shellcheck shell=bash
# What every start-up script does: speaks in single lines, replaces files, installs packages, says when it is ready.
# infra/startup/__init__.py puts the settings before this file and the machine's own script after it.
set -Eeuo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

# Each line of standard output and error reaches the journal and the serial console under Google's script runner.
say() { printf 'tpu-stack: %s\n' "$*"; }

# give_up WHY; REMEDY: the script ends, and whoever waits for the machine is told.
give_up() {
  trap - ERR
  say "FAILED: $*" >&2
  tell "no: $*" >&2
  exit 1
}
trap 'give_up "\"$BASH_COMMAND\" ended with $?; the lines before this one and \"journalctl --boot\" say more"' ERR

# `did` is for changes alone, so that a run that finds everything in place can say just that.
changes=0
did() {
  changes=$((changes + 1))
  say "$*"
}

need_settings() {
  local name
  for name in "$@"; do
    if [[ -z ${!name:-} ]]; then
      give_up "the setting $name is missing or empty; render this script with infra/startup/__init__.py"
    fi
  done
}

# Guest attributes are how a VM speaks to whoever may read it: tpu-stack/ready is "starting", "yes", "mounting" or
# "no: why".
tell() { publish ready "$1"; }

# publish NAME VALUE: a machine that cannot works all the same, so this never ends the script.
publish() {
  local host=${GCE_METADATA_HOST:-metadata.google.internal} answer
  answer=$(curl --silent --show-error --noproxy '*' --max-time 5 --retry 2 --output /dev/null \
    --write-out '%{http_code}' --request PUT --header 'Metadata-Flavor: Google' --data-raw "$2" \
    "http://$host/computeMetadata/v1/instance/guest-attributes/tpu-stack/$1" 2>&1) || answer=${answer%%$'\n'*}
  case $answer in
    2*) ;;
    403 | 404) say "could not tell \"$2\": guest attributes are off; set enable-guest-attributes=TRUE, or the policy compute.disableGuestAttributesAccess forbids them" ;;
    *) say "could not tell \"$2\" to the metadata server $host: $answer" ;;
  esac
}

# Two at once happen when a person runs the script by hand while the machine boots: the second waits for the first.
one_at_a_time() {
  exec 9>/run/tpu-stack-startup.lock
  flock --timeout 900 9 || give_up "another run of this script has not ended for 15 minutes; see: fuser -v /run/tpu-stack-startup.lock"
}

# put_file PATH: what comes on standard input becomes the file, whole or not at all; nothing is done if it is so already.
# Not at the end of a pipe, which is a shell of its own where `did` counts for nothing.
put_file() {
  local path=$1 new
  new="$(dirname "$path")/.tpu-stack.new"
  mkdir -p "$(dirname "$path")"
  cat >"$new"
  chmod 0644 "$new"
  if cmp --silent "$new" "$path"; then
    rm "$new"
  else
    mv "$new" "$path"
    did "wrote $path"
  fi
}

# mask_units UNIT…: never started, by nobody; also units that a package will only bring.
mask_units() {
  local unit open=()
  for unit in "$@"; do
    [[ $(systemctl is-enabled "$unit" 2>/dev/null) == masked* ]] || open+=("$unit")
  done
  ((${#open[@]} > 0)) || return 0
  systemctl --quiet mask --now "${open[@]}" 2>/dev/null
  did "masked ${open[*]}"
}

all_installed() {
  local states
  states=$(dpkg-query --show --showformat='${db:Status-Status}\n' "$@" 2>/dev/null) || return 1
  ! grep --quiet --invert-match --line-regexp installed <<<"$states"
}

# At the first boot the image's own upgrades (apt-daily, unattended-upgrades) often hold the lock of dpkg for minutes.
apt_get() {
  apt-get --quiet --yes --no-install-recommends --option DPkg::Lock::Timeout=300 --option Acquire::Retries=3 \
    --option Dpkg::Options::=--force-confold "$@" 2>&1
}

# install_packages NAME…: not a word with any server if all are there.
install_packages() {
  all_installed "$@" && return
  local try pause_s=5 output
  for try in 1 2 3 4 5 6; do
    if output=$(apt_get update && apt_get install "$@"); then
      did "installed $*"
      return
    fi
    say "try $try of 6 to install $*: $(tail --lines 1 <<<"$output"); the next in $pause_s s"
    # A machine that was reset in the middle of an installation has packages half set up, and apt refuses all else.
    output=$(dpkg --configure -a 2>&1) || say "dpkg --configure -a: $(tail --lines 1 <<<"$output")"
    sleep "$pause_s"
    pause_s=$((pause_s * 2))
  done
  give_up "could not install $*; without an external address a machine reaches Debian's servers through Cloud NAT only"
}
